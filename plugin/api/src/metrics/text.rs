//! OpenMetrics' text format and Prometheus' older one, and which of them a client wants.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// OpenMetrics 1.0.
    Open,
    /// Prometheus' 0.0.4, which every tool reads.
    Classic,
}

impl Format {
    /// What to call it in the answer.
    pub fn content_type(self) -> &'static str {
        match self {
            Format::Open => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Format::Classic => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// The one that an `Accept` header prefers; the older one where it does not say (RFC 9110, 12.5.1).
    pub fn wanted(accept: Option<&str>) -> Self {
        let (mut open, mut classic) = (0.0, 0.0);
        for range in accept.unwrap_or_default().split(',') {
            let mut parts = range.split(';').map(str::trim);
            let name = parts.next().unwrap_or_default().to_ascii_lowercase();
            let (mut weight, mut known) = (1.0, true);
            for (key, value) in parts.filter_map(|part| part.split_once('=')) {
                match key.trim() {
                    "q" => weight = value.trim().parse().unwrap_or(0.0),
                    "version" => known = matches!(value.trim(), "1.0.0" | "0.0.1" | "0.0.4"),
                    _ => {}
                }
            }
            let best = match name.as_str() {
                "application/openmetrics-text" if known => &mut open,
                "text/plain" if known => &mut classic,
                _ => continue,
            };
            *best = f64::max(*best, weight);
        }
        if open > 0.0 && open >= classic { Format::Open } else { Format::Classic }
    }
}

/// OpenMetrics' text as Prometheus' older format: counters and infos are named with their suffix, units and
/// the end are not marked.
pub(super) fn classic(open: &str) -> String {
    let mut out = String::with_capacity(open.len());
    let mut help = None;
    for line in open.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            // How it is named depends on its type, which comes next.
            help = rest.split_once(' ').map(|(_, text)| text);
        } else if let Some((name, kind)) =
            line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                other => ("", other),
            };
            for part in ["# HELP ", name, suffix, " ", help.take().unwrap_or_default(), "\n"] {
                out.push_str(part);
            }
            for part in ["# TYPE ", name, suffix, " ", kind, "\n"] {
                out.push_str(part);
            }
        } else if !line.starts_with('#') {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_gets_the_format_that_it_prefers() {
        use Format::{Classic, Open};
        let prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
            application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,\
            text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for (accept, want) in [
            (Some(prometheus), Open),
            (Some("application/openmetrics-text"), Open),
            (Some("Application/OpenMetrics-Text; version=1.0.0"), Open),
            (Some("application/openmetrics-text; version=2.0.0"), Classic),
            (Some("application/openmetrics-text;q=0"), Classic),
            (Some("application/openmetrics-text;q=0.1, text/plain"), Classic),
            (Some("application/openmetrics-text;q=nonsense, text/plain;q=0.1"), Classic),
            (Some("*/*"), Classic),
            (Some("text/html, ;;=,q=1"), Classic),
            (Some(""), Classic),
            (None, Classic),
        ] {
            assert_eq!(Format::wanted(accept), want, "{accept:?}");
        }
    }

    #[test]
    fn the_older_format_names_counters_with_their_suffix() {
        let open = "# HELP a_seconds what it is\n# TYPE a_seconds counter\n# UNIT a_seconds seconds\n\
                    a_seconds_total{x=\"# y\"} 1.0\n# HELP b info\n# TYPE b info\nb_info{v=\"1\"} 1\n\
                    # HELP c g\n# TYPE c gauge\nc 7\n# EOF\n";
        let want = "# HELP a_seconds_total what it is\n# TYPE a_seconds_total counter\n\
                    a_seconds_total{x=\"# y\"} 1.0\n# HELP b_info info\n# TYPE b_info gauge\n\
                    b_info{v=\"1\"} 1\n# HELP c g\n# TYPE c gauge\nc 7\n";
        assert_eq!(classic(open), want);
    }
}
