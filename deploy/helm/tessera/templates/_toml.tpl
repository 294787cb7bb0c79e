{{/* Values as TOML. Helm's toToml writes 4 as 4.0: values come as floating-point numbers. */}}
{{- define "tessera.toml" -}}
{{- range $name, $section := . }}
{{- if kindIs "map" $section }}
[{{ include "tessera.toml.key" $name }}]
{{- range $key, $value := $section }}
{{ include "tessera.toml.key" $key }} = {{ include "tessera.toml.value" $value }}
{{- end }}
{{ else if kindIs "slice" $section }}
{{- range $section }}
[[{{ include "tessera.toml.key" $name }}]]
{{- range $key, $value := . }}
{{ include "tessera.toml.key" $key }} = {{ include "tessera.toml.value" $value }}
{{- end }}
{{ end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "tessera.toml.key" -}}
{{- if regexMatch "^[A-Za-z0-9_-]+$" . -}}{{ . }}{{- else -}}{{ . | toRawJson }}{{- end -}}
{{- end -}}

{{- define "tessera.toml.value" -}}
{{- if kindIs "map" . -}}
{ {{- range $i, $key := keys . | sortAlpha }}{{ if $i }},{{ end }} {{ include "tessera.toml.key" $key }} = {{ include "tessera.toml.value" (get $ $key) }}{{ end }} }
{{- else if kindIs "slice" . -}}
[{{ range $i, $value := . }}{{ if $i }}, {{ end }}{{ include "tessera.toml.value" $value }}{{ end }}]
{{- else if kindIs "string" . -}}
{{ toRawJson . }}
{{- else if kindIs "float64" . -}}
{{- if eq (floor .) . }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}

{{/* That, of the configuration and those by node label: list ROOT CONFIGURATION. */}}
{{- define "tessera.start" -}}
{{- $root := index . 0 -}}
{{- $config := index . 1 -}}
{{- include "tessera.toml.start" $config -}}
{{- if $root.Values.nodeConfigs.enabled -}}
{{- range $name, $own := $root.Values.nodeConfigs.configurations -}}
{{ $name }}{{ include "tessera.toml.start" (include "tessera.nodeConfig" (list $root $config $name $own) | fromJson) }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
What the plugin takes from its configuration at its start alone, of a configuration, as JSON: "after a restart" in
docs/configuration.md. All else it reloads live.
*/}}
{{- define "tessera.toml.start" -}}
{{- $start := pick . "api" "paths" "pages" -}}
{{- range $table, $key := dict "cdi" "directory" "dra" "enabled" "ledger" "fsync" "log" "format" "metrics" "listen" -}}
{{- with pick (get $ $table | default dict) $key }}{{ $_ := set $start $table . }}{{ end -}}
{{- end -}}
{{- toJson $start -}}
{{- end -}}
