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

{{- define "restow.host" -}}
{{- printf "%s.%s" (include "restow.fullname" .) .Release.Namespace -}}
{{- end -}}

{{- /* Several brokers: their StatefulSet, whose pods' names are 11 characters longer at most. */ -}}
{{- define "restow.set" -}}
{{- include "restow.fullname" . | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "restow.brokers" -}}
{{- printf "%s-brokers" (include "restow.set" .) -}}
{{- end -}}

{{- /* The registry that says which broker leads; empty: there is one broker. */ -}}
{{- define "restow.registry" -}}
{{- if .Values.etcd.endpoints -}}etcd{{- else if .Values.kubernetesLeases.enabled -}}leases{{- end -}}
{{- end -}}

{{- /* Two releases that use one etcd must not take each other for their own. */ -}}
{{- define "restow.fleet" -}}
{{- dig "fleet" "" .Values.settings | default (printf "%s.%s" .Release.Namespace (include "restow.fullname" .) | trunc 63 | trimAll "-.") -}}
{{- end -}}

{{- /* What engines are given. */ -}}
{{- define "restow.addresses" -}}
{{- if include "restow.registry" . -}}
{{- range $one := until (int .Values.replicas) -}}
{{- if $one }},{{ end -}}
{{- printf "%s-%d.%s.%s:%d" (include "restow.set" $) $one (include "restow.brokers" $) $.Release.Namespace (int $.Values.ports.grpc) -}}
{{- end -}}
{{- else -}}
{{- printf "%s:%d" (include "restow.host" .) (int .Values.ports.grpc) -}}
{{- end -}}
{{- end -}}

{{- define "restow.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- /* Helm reads all numbers of a file as floats, and would write 1e+06. */ -}}
{{- define "restow.number" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}
{{- int64 . -}}
{{- else -}}
{{- toString . -}}
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
{{- if and .Values.operator.secretName (not $tls) -}}
{{- fail "without TLS everybody is an operator: operator.secretName needs tls.secretName" -}}
{{- end -}}
{{- if and (gt (int .Values.replicas) 1) (not (include "restow.registry" .)) -}}
{{- fail "several brokers need a registry that says which one leads: set etcd.endpoints or kubernetesLeases.enabled, or replicas=1" -}}
{{- end -}}
{{- if and .Values.etcd.endpoints .Values.kubernetesLeases.enabled -}}
{{- fail "brokers use one registry: etcd.endpoints and kubernetesLeases.enabled exclude each other" -}}
{{- end -}}
{{- if and (or .Values.etcd.secretName .Values.etcd.user .Values.etcd.clientCertificate) (not .Values.etcd.endpoints) -}}
{{- fail "etcd.secretName, etcd.user and etcd.clientCertificate say how etcd knows the brokers: set etcd.endpoints too" -}}
{{- end -}}
{{- if and (or .Values.etcd.user .Values.etcd.clientCertificate) (not .Values.etcd.secretName) -}}
{{- fail "etcd.user and etcd.clientCertificate need etcd.secretName: neither is shown in plaintext" -}}
{{- end -}}
{{- if and .Values.etcd.endpoints (not .Values.etcd.secretName) (not .Values.insecure) -}}
{{- fail "whoever writes to etcd decides which broker leads: set etcd.secretName, with the authority of its certificates, or insecure=true on a network that you trust" -}}
{{- end -}}
{{- $drain_s := float64 (dig "drain_s" 10 .Values.settings) -}}
{{- if lt (float64 .Values.terminationGracePeriodSeconds) (addf $drain_s 5.0) -}}
{{- fail (printf "terminationGracePeriodSeconds (%v) must be at least 5 more than settings.drain_s (%v): else the broker is killed while it waits for the reads under way" .Values.terminationGracePeriodSeconds $drain_s) -}}
{{- end -}}
{{- if and .Values.settings.config (not .Values.extraVolumeMounts) -}}
{{- fail "settings.config is a file: mount it by extraVolumes and extraVolumeMounts" -}}
{{- end -}}
{{- end -}}
