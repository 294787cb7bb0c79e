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
            Some(module) => targets.with_target(module, level),
            None => targets.with_default(level),
        };
    }
    Ok(targets)
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
    fn a_misspelt_level_is_no_modules_name() {
        for text in ["inof", "tessera=loud", "info,=", "info,=debug", "x=", "info,debgu"] {
            let error = parse(text).expect_err(text);
            assert!(error.contains("neither a level (off, error, warn"), "{error}");
        }
    }
}
