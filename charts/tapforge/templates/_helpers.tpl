{{- /* The operator's image. */ -}}
{{- define "tapforge.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag }}{{ end }}
{{- end -}}

{{- /* "true" where the operator watches nodes. */ -}}
{{- define "tapforge.nodes" -}}
{{- if or (eq (toString .Values.nodes) "true") (and (eq (toString .Values.nodes) "auto") (not .Values.namespaces)) -}}
true
{{- end -}}
{{- end -}}

{{- /* The Secret with the broker's certificate; "" where the operator makes its own. */ -}}
{{- define "tapforge.tlsSecret" -}}
{{- if .Values.tls.secretName -}}
{{ .Values.tls.secretName }}
{{- else if .Values.tls.issuerRef -}}
tapforge-broker-tls
{{- end -}}
{{- end -}}

{{- /* Labels as flags take them: a=b,c=d. */ -}}
{{- define "tapforge.labels" -}}
{{- $pairs := list }}
{{- range $key, $value := . }}
{{- $pairs = append $pairs (printf "%s=%s" $key $value) }}
{{- end }}
{{- join "," $pairs }}
{{- end -}}
