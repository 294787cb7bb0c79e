//! What the terminal takes, and printing to it.

use std::io::{self, IsTerminal, Write, stdout};

use crossterm::terminal::{WindowSize, window_size};

/// Whether the terminal takes colours, by the environment: `NO_COLOR` (no-color.org) and `TERM`.
pub fn has_colour() -> bool {
    std::env::var("NO_COLOR").unwrap_or_default().is_empty() && !is_dumb()
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
