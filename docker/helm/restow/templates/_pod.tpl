{{- /* The pod of a broker: the only one, or one of several. */ -}}
{{- define "restow.pod" -}}
metadata:
  labels:
    {{- include "restow.labels" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .Values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "restow.fullname" . }}
  automountServiceAccountToken: {{ eq (include "restow.registry" .) "leases" }}
  # Services of the namespace would show up as RESTOW_PORT and the like, which are no settings.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- if and .Values.operator.secretName (not (include "restow.registry" .)) }}
  # `kubectl exec` calls the broker by the name that its certificate has.
  hostAliases:
    - {ip: 127.0.0.1, hostnames: ["{{ include "restow.host" . }}"]}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    seccompProfile:
      type: RuntimeDefault
  containers:
    - name: broker
      image: {{ include "restow.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - serve
        - --log-format
        - json
        {{- if .Values.insecure }}
        - --insecure
        {{- end }}
        # No variables: `kubectl exec` has those, and other files to show.
        {{- if .Values.tls.secretName }}
        - --tls-cert=/etc/restow/tls/tls.crt
        - --tls-key=/etc/restow/tls/tls.key
        {{- end }}
        {{- if .Values.tls.clientCaSecretName }}
        - --client-ca=/etc/restow/clients/ca.crt
        {{- end }}
        {{- if .Values.tokens.secretName }}
        - --tokens=/etc/restow/tokens/tokens.json
        {{- end }}
        {{- if .Values.etcd.secretName }}
        - --etcd-ca=/etc/restow/etcd/ca.crt
        {{- end }}
        {{- if .Values.etcd.clientCertificate }}
        - --etcd-cert=/etc/restow/etcd/tls.crt
        - --etcd-key=/etc/restow/etcd/tls.key
        {{- end }}
        {{- if .Values.etcd.user }}
        - --etcd-user={{ .Values.etcd.user }}
        - --etcd-password-file=/etc/restow/etcd/password
        {{- end }}
      env:
        - name: RESTOW_LISTEN
          value: "0.0.0.0:{{ .Values.ports.grpc }}"
        - name: RESTOW_HTTP_LISTEN
          value: "0.0.0.0:{{ .Values.ports.http }}"
        {{- $host := include "restow.host" . }}
        {{- if include "restow.registry" . }}
        {{- $host = printf "$(POD_NAME).%s.%s" (include "restow.brokers" .) .Release.Namespace }}
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        {{- if not (hasKey .Values.settings "fleet") }}
        - name: RESTOW_FLEET
          value: {{ include "restow.fleet" . | quote }}
        {{- end }}
        # A name, not an address, because the certificate has names.
        - name: RESTOW_ADVERTISE
          value: "{{ $host }}:{{ .Values.ports.grpc }}"
        - name: RESTOW_EXPECT_BROKERS
          value: {{ .Values.replicas | quote }}
        {{- end }}
        {{- if eq (include "restow.registry" .) "leases" }}
        - name: RESTOW_KUBERNETES_LEASES
          value: {{ .Release.Namespace | quote }}
        {{- end }}
        {{- if .Values.etcd.endpoints }}
        - name: RESTOW_ETCD
          value: {{ .Values.etcd.endpoints | quote }}
        {{- end }}
        # For `kubectl exec`.
        - name: RESTOW_BROKER
          value: "{{ if .Values.operator.secretName }}{{ $host }}{{ else }}127.0.0.1{{ end }}:{{ .Values.ports.grpc }}"
        {{- if .Values.operator.secretName }}
        - name: RESTOW_TLS_CA
          value: /etc/restow/operator/ca.crt
        {{- if .Values.tokens.secretName }}
        - name: RESTOW_TOKEN_FILE
          value: /etc/restow/operator/token
        {{- else }}
        - name: RESTOW_TLS_CERT
          value: /etc/restow/operator/tls.crt
        - name: RESTOW_TLS_KEY
          value: /etc/restow/operator/tls.key
        {{- end }}
        {{- end }}
        {{- range $name, $value := .Values.settings }}
        - name: RESTOW_{{ upper $name }}
          value: {{ include "restow.number" $value | quote }}
        {{- end }}
        {{- with .Values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - name: grpc
          containerPort: {{ .Values.ports.grpc }}
        - name: http
          containerPort: {{ .Values.ports.http }}
      # On a port of their own: a probe has no certificate.
      startupProbe:
        httpGet: {path: /healthz, port: http}
        periodSeconds: 1
        failureThreshold: 60
      livenessProbe:
        httpGet: {path: /healthz, port: http}
        periodSeconds: 10
        timeoutSeconds: 6
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /readyz, port: http}
        periodSeconds: 5
        timeoutSeconds: 6
      resources: {{- toYaml .Values.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
      {{- if or .Values.tls.secretName .Values.etcd.secretName .Values.extraVolumeMounts }}
      volumeMounts:
        {{- if .Values.tls.secretName }}
        - {name: tls, mountPath: /etc/restow/tls, readOnly: true}
        {{- end }}
        {{- if .Values.tls.clientCaSecretName }}
        - {name: clients, mountPath: /etc/restow/clients, readOnly: true}
        {{- end }}
        {{- if .Values.tokens.secretName }}
        - {name: tokens, mountPath: /etc/restow/tokens, readOnly: true}
        {{- end }}
        {{- if .Values.operator.secretName }}
        - {name: operator, mountPath: /etc/restow/operator, readOnly: true}
        {{- end }}
        {{- if .Values.etcd.secretName }}
        - {name: etcd, mountPath: /etc/restow/etcd, readOnly: true}
        {{- end }}
        {{- with .Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
  {{- if or .Values.tls.secretName .Values.etcd.secretName .Values.extraVolumes }}
  volumes:
    {{- if .Values.tls.secretName }}
    - name: tls
      secret: {secretName: {{ .Values.tls.secretName }}, defaultMode: 0440}
    {{- end }}
    {{- if .Values.tls.clientCaSecretName }}
    - name: clients
      secret: {secretName: {{ .Values.tls.clientCaSecretName }}, defaultMode: 0440}
    {{- end }}
    {{- if .Values.tokens.secretName }}
    - name: tokens
      secret: {secretName: {{ .Values.tokens.secretName }}, defaultMode: 0440}
    {{- end }}
    {{- if .Values.operator.secretName }}
    - name: operator
      secret: {secretName: {{ .Values.operator.secretName }}, defaultMode: 0440}
    {{- end }}
    {{- if .Values.etcd.secretName }}
    - name: etcd
      secret: {secretName: {{ .Values.etcd.secretName }}, defaultMode: 0440}
    {{- end }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if .Values.affinity }}
  affinity: {{- toYaml .Values.affinity | nindent 4 }}
  {{- else if include "restow.registry" . }}
  # Not two on one node: both would be lost with it.
  affinity:
    podAntiAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        - topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "restow.selector" . | nindent 14 }}
  {{- end }}
{{- end -}}
