//! What both commands print alike.

use tessera_api::print::{Page, Tone};

/// A name; a dash for none.
pub(super) fn name(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

/// Remarks about what is missing.
pub(super) fn remarks(page: &mut Page, remarks: &[String]) {
    for remark in remarks {
        page.say(0, Tone::Plain, &format!("note: {remark}"));
    }
}
