//! Foreign text on its way to a terminal or a log: pods' names, reasons, answers over gRPC, keys of a file.
//! Whatever it says, it moves no cursor, begins no line, and is read in the order in which it is written.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Write};

/// Whether a character does something other than being seen: controls of terminals (C0, DEL, C1), ends of
/// lines and paragraphs, marks that change the direction of text (Unicode UAX #9), and those that are not
/// seen at all.
fn acts(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{061c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
}

/// The text as one line: what acts is written as `\u` and four hexadecimal digits, which JSON takes too; line
/// ends, returns and tabs as `\n`, `\r` and `\t`.
pub fn line(text: &str) -> Cow<'_, str> {
    escape(text, |_| false)
}

/// The same for a text of several lines of our own.
pub fn lines(text: &str) -> Cow<'_, str> {
    escape(text, |c| c == '\n')
}

fn escape(text: &str, passes: impl Fn(char) -> bool) -> Cow<'_, str> {
    let escapes = |c: char| acts(c) && !passes(c);
    if !text.contains(escapes) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            c if !escapes(c) => out.push(c),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            // Writing to a string does not fail; all of them are below U+10000.
            c => _ = write!(out, "\\u{:04x}", u32::from(c)),
        }
    }
    Cow::Owned(out)
}

/// A text of at most `most` bytes, for a message that quotes somebody: of one that is longer, the beginning and the end,
/// which says what to do.
pub fn brief(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return Cow::Borrowed(text);
    }
    let kept = most.saturating_sub('…'.len_utf8());
    let head = boundary_to(text, kept / 2);
    let tail = boundary_from(text, text.len() - (kept - kept / 2));
    Cow::Owned(format!("{}…{}", &text[..head], &text[tail..]))
}

/// Bytes of a reason that every client of gRPC takes: it travels in a header, where what is no ASCII becomes
/// three times as long, and of headers clients take as little as 8 KiB in all.
const REASON: usize = 1500;

/// Why a request is refused, as its answer says it: in one line, and nothing in it acts.
pub fn reason(error: &impl std::fmt::Display) -> String {
    brief(&line(&error.to_string()), REASON).into_owned()
}

/// An error with its causes: the outer ones say little.
pub fn causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let said = cause.to_string();
        if !text.ends_with(&said) {
            text = format!("{text}: {said}");
        }
        next = cause.source();
    }
    text
}

/// Leaves no more than so many bytes, at least three; `…` stands for what is gone.
pub fn cut(text: &mut String, longest: usize) {
    if text.len() > longest {
        text.truncate(boundary_to(text, longest - '…'.len_utf8()));
        text.push('…');
    }
}

/// The last end of a character up to here, and the first from here on.
fn boundary_to(text: &str, at: usize) -> usize {
    (0..=at).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

fn boundary_from(text: &str, at: usize) -> usize {
    (at..text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len())
}

/// Writes lines of a log: each write is one, with its end.
#[derive(Debug)]
pub struct LogLines<W>(pub W);

impl<W: Write> Write for LogLines<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        let (text, end) = text.strip_suffix('\n').map_or((&*text, ""), |text| (text, "\n"));
        // In one piece, so that lines of several threads do not mix.
        self.0.write_all(format!("{}{end}", line(text)).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_too_long_ends_with_a_sign_of_it_between_two_characters() {
        for (text, longest, left) in
            [("ää", 4, "ää"), ("äää", 5, "ä…"), ("abcdef", 5, "ab…"), ("abcd", 3, "…")]
        {
            let mut text = text.to_owned();
            cut(&mut text, longest);
            assert_eq!(text, left);
        }
    }

    #[test]
    fn what_acts_is_seen_and_what_is_seen_stays() {
        for (text, printed) in [
            ("GPU 0, Zoë's „pod“ 🂡", "GPU 0, Zoë's „pod“ 🂡"),
            ("a\nERROR forged", "a\\nERROR forged"),
            ("\u{1b}[2Jgone\u{7}", "\\u001b[2Jgone\\u0007"),
            ("pod-\u{202e}toor\u{2069}", "pod-\\u202etoor\\u2069"),
            ("\u{9b}31m\u{85}x\r\t\u{2028}", "\\u009b31m\\u0085x\\r\\t\\u2028"),
        ] {
            assert_eq!(line(text), printed);
            assert_eq!(line(printed), printed, "once is enough");
        }
        assert_eq!(lines("a\n\u{1b}b\n"), "a\n\\u001bb\n");
    }

    #[test]
    fn a_log_line_stays_one_line() {
        let mut out = Vec::new();
        LogLines(&mut out).write_all(b"INFO a: b\nERROR forged \x1b[0m\n").unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "INFO a: b\\nERROR forged \\u001b[0m\n");
        // JSON stays JSON.
        let mut out = Vec::new();
        let event = serde_json::json!({"pod": "a\u{202e}b\nc"}).to_string() + "\n";
        LogLines(&mut out).write_all(event.as_bytes()).unwrap();
        let read: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(read["pod"], "a\u{202e}b\nc");
    }

    proptest! {
        #[test]
        fn a_brief_text_is_bounded_and_has_the_same_ends(text in ".{0,2000}", most in 20usize..900) {
            let short = brief(&text, most);
            prop_assert!(short.len() <= most, "{}", short.len());
            prop_assert_eq!(text.chars().next(), short.chars().next());
            prop_assert_eq!(text.chars().last(), short.chars().last());
        }

        #[test]
        fn nothing_that_acts_is_left(text in any::<String>()) {
            prop_assert!(!line(&text).contains(acts));
            prop_assert!(!reason(&text).contains(acts));
            prop_assert_eq!(lines(&text).matches('\n').count(), text.matches('\n').count());
        }
    }
}
