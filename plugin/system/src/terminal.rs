//! What the terminal takes, and printing to it.

use std::io::{self, IsTerminal, Write, stdout};

use crossterm::terminal::{WindowSize, window_size};

/// Which characters and colours the terminal takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    pub colour: bool,
    pub unicode: bool,
}

impl Look {
    /// From the environment: `NO_COLOR` (no-color.org), `TERM`, and the locale.
    pub fn from_env() -> Self {
        let var = |name: &str| std::env::var(name).unwrap_or_default();
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].map(var).into_iter().find(|v| !v.is_empty());
        let locale = locale.unwrap_or_default().to_ascii_uppercase();
        Self {
            colour: var("NO_COLOR").is_empty() && !is_dumb(),
            // Nearly every terminal draws blocks; a locale that names another encoding does not.
            unicode: locale.is_empty() || locale.contains("UTF"),
        }
    }
}

pub fn is_dumb() -> bool {
    std::env::var("TERM").is_ok_and(|term| term == "dumb")
}

/// Prints text on standard output. A reader that has gone, like `head`, wants no more: that is no error.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(io::Error::new(error.kind(), format!("standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// Columns and rows of the terminal that standard output is. `None` where it is none, or does not tell.
pub fn size() -> Option<(u16, u16)> {
    // crossterm asks the controlling terminal, also for a pipe.
    if !stdout().is_terminal() {
        return None;
    }
    let WindowSize { columns, rows, .. } = window_size().ok()?;
    (columns > 0 && rows > 0).then_some((columns, rows))
}
