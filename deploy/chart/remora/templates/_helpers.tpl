{{- /* Labels, names, and what the pods of the primary and of the replicas share. */ -}}

{{- define "remora.selector" -}}
app.kubernetes.io/name: remora
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "remora.labels" -}}
{{ include "remora.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "remora.image" -}}
{{ .Values.image.remora | default (printf "remora:%s" .Chart.AppVersion) }}
{{- end }}

{{- define "remora.serverImage" -}}
{{ .Values.server.image | default (eq .Values.server.kind "redis" | ternary "redis:7" "valkey/valkey:9.1") }}
{{- end }}

{{- define "remora.secret" -}}
{{ .Values.auth.existingSecret | default (printf "%s-secrets" .Release.Name) }}
{{- end }}

{{- /* The primary, as the other pods of this namespace find it. */ -}}
{{- define "remora.primary" -}}
{{ .Release.Name }}-primary-0.{{ .Release.Name }}-primary
{{- end }}

{{- /* Options with which an agent reaches the server beside it. */ -}}
{{- define "remora.toServer" -}}
- --server
- {{ empty .Values.tls.existingSecret | ternary "redis" "rediss" }}://127.0.0.1:6379
{{- if .Values.auth.usePassword }}
- --password-file
- /run/remora/password/password
{{- end }}
{{- if .Values.tls.existingSecret }}
- --tls-ca
- /run/remora/tls/ca.crt
- --tls-cert
- /run/remora/tls/tls.crt
- --tls-key
- /run/remora/tls/tls.key
- --tls-server-name
- {{ .Values.tls.serverName | default (include "remora.primary" .) }}
{{- end }}
{{- end }}

{{- define "remora.agentSecurity" -}}
runAsUser: 65532
runAsNonRoot: true
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- define "remora.agentMounts" -}}
- { name: token, mountPath: /run/remora/token, readOnly: true }
{{ include "remora.serverSecrets" . }}
{{- end }}

{{- define "remora.serverSecrets" -}}
{{- if .Values.auth.usePassword -}}
- { name: password, mountPath: /run/remora/password, readOnly: true }
{{ end }}
{{- if .Values.tls.existingSecret -}}
- { name: tls, mountPath: /run/remora/tls, readOnly: true }
{{ end }}
{{- end }}

{{- /* Alive means that the agent answers. The first argument is how long that may take at the start, in seconds. */ -}}
{{- define "remora.agentProbes" -}}
startupProbe:
  httpGet: { path: /healthz, port: metrics }
  periodSeconds: 1
  timeoutSeconds: 6
  failureThreshold: {{ index . 0 }}
livenessProbe:
  httpGet: { path: /healthz, port: metrics }
  periodSeconds: 10
  timeoutSeconds: 6
  failureThreshold: 6
{{- end }}

{{- /* The server: its configuration from the ConfigMap, its password from the Secret, and never a word of it in its arguments. */ -}}
{{- define "remora.server" -}}
- name: server
  image: {{ include "remora.serverImage" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [sh, -c]
  args:
    - |
      set -eu
      umask 077
      echo "include /etc/server/server.conf" >/run/server/server.conf
{{- if .Values.auth.usePassword }}
      read -r password </run/remora/password/password || test -n "$password"
      printf 'requirepass "%s"\nmasterauth "%s"\n' "$password" "$password" >>/run/server/server.conf
{{- end }}
      exec {{ .Values.server.kind }}-server /run/server/server.conf
  ports:
    - { name: server, containerPort: 6379 }
  startupProbe:
    tcpSocket: { port: server }
    periodSeconds: 1
    failureThreshold: {{ .Values.startupSeconds }}
  livenessProbe:
    tcpSocket: { port: server }
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  securityContext:
    runAsUser: {{ .Values.server.uid }}
    runAsNonRoot: true
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: { drop: [ALL] }
  resources: {{- toYaml .Values.server.resources | nindent 4 }}
  volumeMounts:
    - { name: data, mountPath: /data }
    - { name: run, mountPath: /run/server }
    - { name: config, mountPath: /etc/server, readOnly: true }
    {{- include "remora.serverSecrets" . | trim | nindent 4 }}
{{- end }}

{{- /* Volumes of both kinds of pods, but for the data. The first argument is the key of the ConfigMap. */ -}}
{{- define "remora.volumes" -}}
{{- $key := index . 0 }}{{ $ := index . 1 -}}
# 0440: remora refuses secrets that every user can read. The group is fsGroup.
- name: token
  secret: { secretName: {{ include "remora.secret" $ }}, defaultMode: 0440, items: [{ key: token, path: token }] }
{{- if $.Values.auth.usePassword }}
- name: password
  secret: { secretName: {{ include "remora.secret" $ }}, defaultMode: 0440, items: [{ key: password, path: password }] }
{{- end }}
{{- if $.Values.tls.existingSecret }}
- name: tls
  secret: { secretName: {{ $.Values.tls.existingSecret }}, defaultMode: 0440 }
{{- end }}
- name: config
  configMap: { name: {{ $.Release.Name }}-servers, items: [{ key: {{ $key }}, path: server.conf }] }
- name: run
  emptyDir: { medium: Memory, sizeLimit: 1Mi }
{{- end }}

{{- define "remora.placement" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  fsGroup: {{ .Values.server.uid }} # the data and the secrets
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.spread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "remora.selector" . | nindent 8 }}
{{- end }}
{{- end }}

{{- define "remora.annotations" -}}
remora/config: {{ include (print .Template.BasePath "/servers.yaml") . | sha256sum }}
{{- with .Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* The claim or the folder of a kind of pods; the first argument is its persistence. */ -}}
{{- define "remora.claim" -}}
- metadata:
    name: data
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .storageClass }}
    storageClassName: {{ . }}
    {{- end }}
    resources: { requests: { storage: {{ .size }} } }
{{- end }}
