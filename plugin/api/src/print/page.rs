//! Lines and paragraphs.

use std::fmt::Write;

use super::Paper;
use super::width::{broken, columns, wrap};
use tessera_model::printable;

/// How something looks where there is colour. The words say the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tone {
    /// As it is.
    #[default]
    Plain,
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
    pub fn new(paper: Paper) -> Self {
        Page { paper, out: String::new() }
    }

    /// Whether nothing is to be shortened.
    pub fn is_wide(&self) -> bool {
        self.paper.width.is_none()
    }

    /// An empty line.
    pub fn gap(&mut self) {
        self.out.push('\n');
    }

    /// A paragraph: further lines stand two columns farther right.
    pub fn say(&mut self, indent: usize, tone: Tone, text: &str) {
        self.paragraph(&format!("{:indent$}", ""), indent + 2, tone, text);
    }

    /// A paragraph behind a label: further lines stand below its text.
    pub fn labelled(&mut self, label: &str, text: &str) {
        self.paragraph(label, columns(label), Tone::Plain, text);
    }

    fn paragraph(&mut self, first: &str, further: usize, tone: Tone, text: &str) {
        let text = printable::line(text);
        let lines = match self.paper.width {
            // The first line may be as long as the others, so that nothing depends on where it breaks.
            Some(width) => wrap(&text, width.saturating_sub(further)),
            None => vec![&*text],
        };
        for (at, line) in lines.iter().enumerate() {
            let begin = if at == 0 { first.to_owned() } else { " ".repeat(further) };
            // Writing to a string does not fail.
            let _ = writeln!(self.out, "{begin}{}", tone.paint(line, self.paper));
        }
    }

    /// What is missing, a sentence each.
    pub fn notes(&mut self, notes: &[String]) {
        notes.iter().for_each(|note| self.say(0, Tone::Plain, &format!("note: {note}")));
    }

    /// Text that is laid out already, and safe to print.
    pub fn push(&mut self, text: &str) {
        self.out.push_str(text);
    }

    /// Lines that have their indentation already: what is too long goes on two columns right of where the text
    /// of its line begins, or of `column` in a line that is indented less.
    pub fn lines(&mut self, column: usize, text: &str) {
        for line in text.lines() {
            let line = printable::line(line);
            let own = line.len() - line.trim_start_matches(' ').len();
            let further = if own == 0 { 2 } else { own.max(column) + 2 };
            let wrapped = match self.paper.width {
                Some(width) if columns(&line) > width => {
                    let (begin, rest) = broken(&line, width);
                    let mut lines = vec![begin.to_owned()];
                    let rest = wrap(rest, width.saturating_sub(further));
                    lines.extend(rest.iter().map(|line| format!("{:further$}{line}", "")));
                    lines
                }
                _ => vec![line.into_owned()],
            };
            for line in wrapped {
                self.out.push_str(line.trim_end_matches(' '));
                self.out.push('\n');
            }
        }
    }

    /// All of it.
    pub fn finish(self) -> String {
        self.out
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn laid(width: usize, text: &str) -> String {
        let mut page = Page::new(Paper { width: Some(width), colour: false });
        page.lines(9, text);
        page.finish()
    }

    #[test]
    fn a_long_line_goes_on_below_its_text() {
        let text = "a heading of its own, long\n  title  one two three four\n           five six seven eight\n\n";
        assert_eq!(
            laid(22, text),
            "a heading of its own,\n  long\n  title  one two three\n           four\n           five six\n             seven\n             eight\n\n"
        );
        assert_eq!(laid(60, text), text);
    }

    proptest! {
        #[test]
        fn no_line_is_too_wide_and_no_word_is_lost(
            lines in prop::collection::vec("[ ]{0,14}(\\PC| ){0,200}", 0..6),
            width in 40usize..140,
        ) {
            let text = lines.join("\n");
            let laid = laid(width, &text);
            for line in laid.lines() {
                prop_assert!(columns(line) <= width, "{line:?}");
            }
            let bare = |text: &str| text.split([' ', '\n']).collect::<String>();
            let printed: Vec<_> = text.lines().map(printable::line).collect();
            prop_assert_eq!(bare(&laid), bare(&printed.join("\n")));
        }
    }
}
