//! `log.filter`: levels, for everything and for single modules.

use tracing_subscriber::filter::{LevelFilter, Targets};

/// Most bytes of a filter: each of its words is compared with all others.
pub(super) const LONGEST: usize = 4096;

/// Reads `info,tessera_arbiter=debug` and the like. Without a level of all nothing else is logged.
///
/// # Errors
/// A text that is too long; a word that is no level, and a module without a name. `Targets` alone takes such a
/// word for a module's name: after a misspelt `info` no error would be logged ever again.
pub fn parse(text: &str) -> Result<Targets, String> {
    if text.len() > LONGEST {
        return Err(format!("is longer than {LONGEST} bytes: name fewer modules"));
    }
    let mut targets = Targets::new();
    for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        let (module, level) = match word.split_once('=') {
            Some((module, level)) => (Some(module.trim()), level.trim()),
            None => (None, word),
        };
        let read = level.parse::<LevelFilter>().ok().filter(|_| !level.is_empty());
        let Some(level) = read.filter(|_| module != Some("")) else {
            return Err(format!(
                "not a filter: `{word}` is neither a level (off, error, warn, info, debug, trace) nor a \
                 module's, as in `info,tessera_arbiter=debug`"
            ));
        };
        targets = match module {
            Some(module) => targets.with_target(current_name(module), level),
            None => targets.with_default(level),
        };
    }
    Ok(targets)
}

/// Modules of `tessera_plugin`, which was one crate, by the crate that has them now.
const FORMER: [(&str, &[&str]); 10] = [
    ("tessera_system", &["files", "descriptors"]),
    ("tessera_gpu", &["device"]),
    ("tessera_store", &["ledger"]),
    ("tessera_peers", &["session"]),
    ("tessera_tenant", &["regions", "delivery", "shim_install"]),
    ("tessera_rpc", &["grpc"]),
    ("tessera_agent", &["node", "observe", "trust", "reload", "kubernetes", "labels", "incidents"]),
    ("tessera_api", &["admin", "metrics", "explain"]),
    ("tessera_daemon", &["app"]),
    ("tessera", &["arbiter", "kubelet", "config", "cli", "run", "top"]),
];

/// What a filter of an earlier version means today. All crates' names begin with `tessera`.
fn current_name(module: &str) -> String {
    let Some(rest) = module.strip_prefix("tessera_plugin") else { return module.to_owned() };
    let Some(path) = rest.strip_prefix("::") else {
        return if rest.is_empty() { "tessera".to_owned() } else { module.to_owned() };
    };
    let (first, more) = path.split_once("::").map_or((path, ""), |(first, more)| (first, more));
    let Some((name, _)) = FORMER.iter().find(|(_, modules)| modules.contains(&first)) else {
        return module.to_owned();
    };
    // These crates have the module in their name, or at their root.
    let at_root = ["device", "ledger", "session", "grpc", "app"].contains(&first);
    let base = match *name {
        "tessera" => format!("tessera_{first}"),
        name if at_root => name.to_owned(),
        name => format!("{name}::{first}"),
    };
    if more.is_empty() { base } else { format!("{base}::{more}") }
}

/// What [`parse`] takes, as a regular expression.
pub(super) fn pattern() -> String {
    let levels = ["off", "error", "warn", "info", "debug", "trace"].map(|level| {
        let either = |c: char| format!("[{}{c}]", c.to_ascii_uppercase());
        level.chars().map(either).collect::<String>()
    });
    let level = format!(r"({}|\+?0*[0-5])", levels.join("|"));
    let word = format!(r"\s*(([^,=]*[^,=\s][^,=]*=\s*)?{level}\s*)?");
    format!("^{word}(,{word})*$")
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::filter::LevelFilter;

    use super::parse;

    #[test]
    fn levels_are_of_all_and_of_modules() {
        let targets = parse("warn, tessera_api::metrics=debug,h2=off").expect("a filter");
        let would = |module: &str, level| targets.would_enable(module, &level);
        assert!(would("tokio", tracing::Level::WARN) && !would("tokio", tracing::Level::INFO));
        assert!(would("tessera_api::metrics::server", tracing::Level::DEBUG));
        assert!(!would("h2::codec", tracing::Level::ERROR));
        assert!(
            parse("off").is_ok_and(|targets| targets.default_level() == Some(LevelFilter::OFF))
        );
    }

    #[test]
    fn filters_of_earlier_versions_mean_what_they_meant() {
        for (before, now) in [
            ("tessera_plugin", "tessera"),
            ("tessera_plugin::app", "tessera_daemon"),
            ("tessera_plugin::node::life", "tessera_agent::node::life"),
            ("tessera_plugin::arbiter::policy", "tessera_arbiter::policy"),
            ("tessera_plugin::ledger::store", "tessera_store::store"),
            ("tessera_plugin::nothing", "tessera_plugin::nothing"),
            ("tessera_pluginx", "tessera_pluginx"),
            ("h2", "h2"),
        ] {
            assert_eq!(super::current_name(before), now);
        }
        let all = parse("warn,tessera_plugin=debug").expect("a filter");
        for module in ["tessera_agent::node", "tessera_kubelet", "tessera_daemon"] {
            assert!(all.would_enable(module, &tracing::Level::DEBUG), "{module}");
        }
        assert!(!all.would_enable("h2", &tracing::Level::DEBUG));
    }

    #[test]
    fn a_misspelt_level_is_no_modules_name() {
        for text in ["inof", "tessera=loud", "info,=", "info,=debug", "x=", "info,debgu"] {
            let error = parse(text).expect_err(text);
            assert!(error.contains("neither a level (off, error, warn"), "{error}");
        }
    }
}
