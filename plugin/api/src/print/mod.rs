//! Text for people: paragraphs and tables that fit a width. Foreign text in them moves no cursor and begins
//! no line; a colour never says what words do not.

mod page;
mod sheet;
mod width;

pub use page::{Page, Tone};
pub use sheet::{Cell, Column, Sheet, table};
pub use width::{columns, head, shorten, wrap};

use std::io::IsTerminal;

use tessera_system::terminal;

/// Most columns of a view for people: it fits half a screen, a chat and a terminal over a bad line.
pub const WIDEST: usize = 120;
/// A terminal that is narrower gets lines of this width, which it wraps.
const NARROWEST: usize = 40;

/// What standard output takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paper {
    /// Columns; `None` for as many as there must be.
    pub width: Option<usize>,
    /// Escape sequences for colour.
    pub colour: bool,
}

impl Paper {
    /// Of this process; with `wide`, nothing is shortened.
    pub fn of_stdout(wide: bool) -> Self {
        let terminal = terminal::size().map(|(columns, _)| usize::from(columns));
        let width = terminal.unwrap_or(WIDEST).clamp(NARROWEST, WIDEST);
        Paper {
            width: (!wide).then_some(width),
            colour: std::io::stdout().is_terminal() && terminal::Look::from_env().colour,
        }
    }

    /// For a file or a test: no colour.
    pub fn plain() -> Self {
        Paper { width: Some(WIDEST), colour: false }
    }
}
