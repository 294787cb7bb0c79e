//! Turns text into a [`Config`], and finds all faults of the text.
//!
//! **After a syntax error.** Where the text without the faulty lines is sound TOML, all its keys are read
//! and their faults are noted, except keys that may be missing only because of the error. Otherwise an error
//! may have changed the meaning of what follows it, so only what stands before the first one is noted.

use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, Error};

use super::report::Report;
use super::steps;
use super::table::read;
use super::{Config, Problem, Source};

/// Most bytes of a text of which every syntax error is looked for: it may have one at each byte, and the parser
/// keeps them all.
const SEARCHED: usize = 64 << 10;

/// What the text says over the defaults, and all that is wrong with it. Where something is, the
/// configuration is what could be read, good for nothing but to find files by.
pub(super) fn parse(text: &str, file: Option<&Path>) -> (Config, Vec<Problem>) {
    let mut report = Report::new(text);
    let mut config = Config::default();
    match errors(text) {
        Ok(root) => read("", root.get_ref(), &mut config, &mut report),
        Err(errors) => {
            let starts = errors.iter().map(|error| error.span().map_or(0, |span| span.start));
            let starts: Vec<usize> = starts.collect();
            for (error, start) in errors.iter().zip(&starts) {
                report.fault("", *start, error.message());
            }
            report.broken = true;
            let mended = without(text, &starts);
            match mended.as_deref().and_then(|mended| DeTable::parse(mended).ok()) {
                Some(root) => read("", root.get_ref(), &mut config, &mut report),
                None => {
                    let (readable, first) = match text.len() <= SEARCHED {
                        true => (text, starts.iter().min().copied().unwrap_or(0)),
                        false => {
                            let sound = sound(text);
                            (sound, sound.len())
                        }
                    };
                    report.doubtful = Some(report.line(first));
                    let (root, _) = DeTable::parse_recoverable(readable);
                    read("", root.get_ref(), &mut config, &mut report);
                }
            }
        }
    }
    let Report { problems, lines, .. } = report;
    let source = Source { file: file.map(Path::to_owned), lines };
    (Config { source, ..config }, problems.finish())
}

/// The text's root, or its syntax errors; of a large text the first.
fn errors(text: &str) -> Result<Spanned<DeTable<'_>>, Vec<Error>> {
    steps::count(text.len());
    if text.len() > SEARCHED {
        return DeTable::parse(text).map_err(|error| vec![error]);
    }
    let (root, errors) = DeTable::parse_recoverable(text);
    if errors.is_empty() { Ok(root) } else { Err(errors) }
}

/// What comes in a large text before something is wrong in it, but for the last lines. The parser names one of
/// the errors, which need not be the first.
fn sound(text: &str) -> &str {
    let mut sound = 0;
    let mut end = 0;
    while let Some(rest) = text.as_bytes().get(end + SEARCHED..)
        && let Some(line) = rest.iter().position(|byte| *byte == b'\n')
    {
        end += SEARCHED + line + 1;
        steps::count(end);
        if DeTable::parse(&text[..end]).is_err() {
            break;
        }
        sound = end;
    }
    &text[..sound]
}

/// The text with spaces instead of the lines in which errors begin; `None` if one of them is a table's header,
/// without which the keys below it would be another table's.
fn without(text: &str, errors: &[usize]) -> Option<String> {
    let mut mended = text.as_bytes().to_vec();
    for &error in errors {
        let error = error.min(text.len());
        let begin = text.as_bytes()[..error].iter().rposition(|byte| *byte == b'\n');
        let begin = begin.map_or(0, |end| end + 1);
        let length = text.as_bytes()[begin..].iter().position(|byte| *byte == b'\n');
        let end = length.map_or(text.len(), |length| begin + length);
        steps::count(end - begin);
        if text.as_bytes()[begin..end].trim_ascii_start().starts_with(b"[") {
            return None;
        }
        mended[begin..end].fill(b' ');
    }
    String::from_utf8(mended).ok()
}

#[cfg(test)]
pub(super) mod tests;
