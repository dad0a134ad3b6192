{{- define "restow.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "restow.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "restow.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "restow.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "restow.selector" -}}
app.kubernetes.io/name: {{ include "restow.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: broker
{{- end -}}

{{- define "restow.labels" -}}
{{ include "restow.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "restow.check" -}}
{{- $tls := .Values.tls.secretName -}}
{{- if not (or $tls .Values.insecure) -}}
{{- fail "without TLS everybody who reaches the broker may do everything: set tls.secretName and tokens.secretName or tls.clientCaSecretName, or insecure=true on a network that you trust" -}}
{{- end -}}
{{- if and $tls .Values.insecure -}}
{{- fail "insecure=true and tls.secretName exclude each other" -}}
{{- end -}}
{{- if and $tls (not (or .Values.tls.clientCaSecretName .Values.tokens.secretName)) -}}
{{- fail "tls.secretName shows who the broker is, and nobody says who the clients are: set tokens.secretName or tls.clientCaSecretName" -}}
{{- end -}}
{{- if and .Values.tls.clientCaSecretName .Values.tokens.secretName -}}
{{- fail "tls.clientCaSecretName and tokens.secretName exclude each other" -}}
{{- end -}}
{{- if and (or .Values.tls.clientCaSecretName .Values.tokens.secretName) (not $tls) -}}
{{- fail "certificates and tokens of clients need TLS: set tls.secretName" -}}
{{- end -}}
{{- end -}}
