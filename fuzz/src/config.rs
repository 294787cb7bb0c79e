//! The configuration's text.

use tessera_plugin::config::Config;

/// Any text is a configuration or a list of problems, each with a place in the text.
pub fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match Config::parse(text) {
        Ok(config) => {
            assert!(config.share.replicas > 0);
            assert!(!config.resource.name.is_empty());
        }
        Err(error) => {
            assert!(!error.problems.is_empty());
            let lines = u32::try_from(text.lines().count().max(1)).unwrap_or(u32::MAX);
            for problem in &error.problems {
                let line = problem.line.and_then(|line| u32::try_from(line).ok());
                assert!(line.is_none_or(|line| (1..=lines + 1).contains(&line)), "{problem:?}");
                assert!(!problem.message.is_empty(), "{problem:?}");
            }
        }
    }
}
