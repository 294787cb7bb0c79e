//! Lines and paragraphs.

use std::fmt::Write;

use super::Paper;
use super::width::wrap;
use tessera_model::printable;

/// How something looks where there is colour. The words say the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tone {
    /// As it is.
    #[default]
    Plain,
    /// A heading.
    Head,
    /// Somebody should look at it.
    Warn,
    /// It is broken.
    Bad,
}

impl Tone {
    /// The text with the escape sequences for it.
    pub(super) fn paint(self, text: &str, paper: Paper) -> String {
        let code = match self {
            _ if !paper.colour || text.is_empty() => return text.to_owned(),
            Tone::Plain => return text.to_owned(),
            Tone::Head => "1",
            Tone::Warn => "33",
            Tone::Bad => "1;31",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// A text in the making.
#[derive(Debug)]
pub struct Page {
    pub(super) paper: Paper,
    pub(super) out: String,
}

impl Page {
    /// An empty one.
    #[must_use]
    pub fn new(paper: Paper) -> Self {
        Page { paper, out: String::new() }
    }

    /// Whether nothing is to be shortened.
    #[must_use]
    pub fn is_wide(&self) -> bool {
        self.paper.width.is_none()
    }

    /// An empty line.
    pub fn gap(&mut self) {
        self.out.push('\n');
    }

    /// A paragraph: further lines stand two columns farther right.
    pub fn say(&mut self, indent: usize, tone: Tone, text: &str) {
        let text = printable::line(text);
        let lines = match self.paper.width {
            // The first line may be as long as the others, so that nothing depends on where it breaks.
            Some(width) => wrap(&text, width.saturating_sub(indent + 2)),
            None => vec![text.into_owned()],
        };
        for (i, line) in lines.iter().enumerate() {
            let indent = if i == 0 { indent } else { indent + 2 };
            // Writing to a string does not fail.
            let _ = writeln!(self.out, "{:indent$}{}", "", tone.paint(line, self.paper));
        }
    }

    /// All of it.
    #[must_use]
    pub fn finish(self) -> String {
        self.out
    }
}
