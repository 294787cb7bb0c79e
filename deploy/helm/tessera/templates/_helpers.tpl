{{/* Names and labels. */}}
{{- define "tessera.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "tessera.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "tessera.name" .) .Release.Name -}}
{{- include "tessera.object" .Release.Name -}}
{{- else -}}
{{- include "tessera.object" (printf "%s-%s" .Release.Name (include "tessera.name" .)) -}}
{{- end -}}
{{- end -}}

{{/*
The name of objects that `.` gives, with room for a suffix. A release's name may have dots and begin with a digit, a
Service's may not: where such a name had to be changed, a hash keeps two of them apart.
*/}}
{{- define "tessera.object" -}}
{{- $short := regexReplaceAll "[-.]+$" (trunc 40 .) "" -}}
{{- if regexMatch "^[a-z][-a-z0-9]*$" $short -}}
{{- $short -}}
{{- else -}}
{{- $plain := regexReplaceAll "^([0-9])" (replace "." "-" .) "t${1}" -}}
{{- printf "%s-%s" (regexReplaceAll "-+$" (trunc 33 $plain) "") (sha256sum . | trunc 6) -}}
{{- end -}}
{{- end -}}

{{- define "tessera.selector" -}}
app.kubernetes.io/name: {{ include "tessera.name" . }}
app.kubernetes.io/instance: {{ .Release.Name | toYaml }}
{{- end -}}

{{- define "tessera.labels" -}}
{{ include "tessera.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- define "tessera.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "tessera.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* The image of `.`: repository, tag, digest. */}}
{{- define "tessera.image" -}}
{{- $image := .image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository ($image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* "true" if the cluster has this API version, or is said to: list ROOT VERSION. */}}
{{- define "tessera.has" -}}
{{- $root := index . 0 -}}
{{- if or ($root.Capabilities.APIVersions.Has (index . 1)) (has (index . 1) $root.Values.assumeApiVersions) -}}true{{- end -}}
{{- end -}}

{{/*
Lays one value over another: list BASE OVER, as {"v": …}. Maps key by key, everything else whole; null takes
a key away. Sprig's mergeOverwrite keeps the base where the other says false, 0 or "".
*/}}
{{- define "tessera.lay" -}}
{{- $base := index . 0 -}}
{{- $over := index . 1 -}}
{{- if and (kindIs "map" $base) (kindIs "map" $over) -}}
{{- $all := dict -}}
{{- range $key, $value := $base -}}
{{- if not (hasKey $over $key) -}}{{- $_ := set $all $key $value -}}{{- end -}}
{{- end -}}
{{- range $key, $value := $over -}}
{{- if not (kindIs "invalid" $value) -}}
{{- if hasKey $base $key -}}
{{- $_ := set $all $key (get (include "tessera.lay" (list (get $base $key) $value) | fromJson) "v") -}}
{{- else -}}
{{- $_ := set $all $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- dict "v" $all | toJson -}}
{{- else -}}
{{- dict "v" $over | toJson -}}
{{- end -}}
{{- end -}}

{{/*
What a profile runs with: dict "root" $ "name" NAME "profile" ENTRY, as JSON. What is not set is there, empty.
*/}}
{{- define "tessera.profile" -}}
{{- $base := pick .root.Values "config" "existingConfigMap" "image" "nodeSelector" "gpuNodeLabels" "affinity" "tolerations" "runtimeClassName" "priorityClassName" "updateStrategy" "podAnnotations" "podLabels" "visibleDevices" "extraEnv" "extraVolumes" "extraVolumeMounts" "resources" -}}
{{- $base = set (deepCopy $base) "config" (get (include "tessera.lay" (list (include "tessera.derived" .root | fromYaml) $base.config) | fromJson) "v") -}}
{{- $all := get (include "tessera.lay" (list $base (.profile | default dict)) | fromJson) "v" -}}
{{- $_ := set $all "name" (ternary (include "tessera.fullname" .root) (printf "%s-%s" (include "tessera.fullname" .root) .name) (eq .name "default")) -}}
{{- if and (dig "dra" "enabled" false $all.config) (not .root.Values.dra.enabled) -}}
{{- fail "config.dra.enabled needs dra.enabled: true, which gives the plugin the rights and sockets for it" -}}
{{- end -}}
{{- $all | toJson -}}
{{- end -}}

{{/* A configuration by node label, as JSON: list ROOT PROFILE'S NAME NAME CONFIGURATION. */}}
{{- define "tessera.nodeConfig" -}}
{{- $name := index . 2 -}}
{{- $own := index . 3 -}}
{{- range list "paths" "pages" "driver" -}}
{{- if hasKey $own . -}}
{{- fail (printf "nodeConfigs.configurations.%s.%s: the DaemonSet's own, so it cannot differ by node; say it in `config`" $name .) -}}
{{- end -}}
{{- end -}}
{{- if dig "cdi" "directory" "" $own -}}
{{- fail (printf "nodeConfigs.configurations.%s.cdi.directory: the DaemonSet mounts it, so it cannot differ by node; say it in `config`" $name) -}}
{{- end -}}
{{- if dig "dra" "enabled" false $own -}}
{{- fail (printf "nodeConfigs.configurations.%s.dra.enabled: read at the plugin's start alone; say it in `config`" $name) -}}
{{- end -}}
{{- get (include "tessera.lay" (list (index . 1) $own) | fromJson) "v" | toJson -}}
{{- end -}}

{{/* The configuration that the manifests need. */}}
{{- define "tessera.derived" -}}
paths:
  pages: {{ .Values.kubeletRoot }}/plugins/tessera.dev/pages
  {{- if ne .Values.kubeletRoot "/var/lib/kubelet" }}
  pod_resources: {{ .Values.kubeletRoot }}/pod-resources/kubelet.sock
  plugins_registry: {{ .Values.kubeletRoot }}/plugins_registry
  dra: {{ .Values.kubeletRoot }}/plugins/gpu.tessera.dev
  {{- end }}
  {{- if ne .Values.stateDir "/var/lib/tessera" }}
  shim: {{ .Values.stateDir }}/shim
  ledger: {{ .Values.stateDir }}/ledger.redb
  {{- end }}
pages:
  tmpfs: require
  size: 64Mi
metrics:
  listen: {{ ternary (printf "%s:%v" .Values.metrics.address .Values.metrics.port) "" .Values.metrics.enabled | quote }}
api:
  listen: {{ ternary (printf "%s:%v" .Values.api.address .Values.api.port) "" .Values.api.enabled | quote }}
{{- if .Values.api.enabled }}
  authorisation: kubernetes
{{- end }}
{{- if not .Values.events.enabled }}
kubernetes:
  events: "off"
{{- end }}
{{- if .Values.dra.enabled }}
dra:
  enabled: true
{{- end }}
{{- if .Values.nodeLabels.nfd }}
labels:
  nfd_file: {{ .Values.nodeLabels.directory }}/tessera
{{- end }}
{{- end -}}
