// Bytes and seconds in words: the same as restow.broker.draw.bytes_and_seconds says, which a test sees to.
function rounded(value, digits) {
  const parts = 10 ** digits;
  return (Math.floor(value * parts + 0.5) / parts).toFixed(digits);
}

function size(bytes) {
  if (bytes < 1023.5) return `${rounded(bytes, 0)} B`;
  for (const unit of ["KiB", "MiB", "GiB"]) {
    bytes /= 1024;
    if (bytes < 1023.95) return `${rounded(bytes, 1)} ${unit}`;
  }
  return `${rounded(bytes / 1024, 1)} TiB`;
}

function rate(bytesPerSecond) { return `${size(bytesPerSecond)}/s`; }

function duration(seconds) {
  if (seconds < 0.0009995) return `${rounded(Math.max(0, seconds) * 1e6, 0)} us`;
  if (seconds < 0.00995) return `${rounded(seconds * 1000, 1)} ms`;
  if (seconds < 0.9995) return `${rounded(seconds * 1000, 0)} ms`;
  if (seconds < 59.95) return `${rounded(seconds, 1)} s`;
  const whole = Math.floor(seconds + 0.5), part = (of) => Math.floor(whole / of);
  if (whole < 3600) return `${part(60)} min ${whole % 60} s`;
  if (whole < 48 * 3600) return `${part(3600)} h ${Math.floor(whole % 3600 / 60)} min`;
  return `${part(86400)} d ${Math.floor(whole % 86400 / 3600)} h`;
}

function known(value, words) { return value === null || value === undefined ? "–" : words(value); }
