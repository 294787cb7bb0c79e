//! `tessera status` for people: what is wrong first, then GPUs, then pods, in as many columns as the paper has.

mod attention;
mod gpus;
mod head;
mod names;
mod pods;
#[cfg(test)]
mod tests;

use tessera_view::status::Status;

use crate::print::{Page, Paper};
pub(crate) use gpus::left;
pub use names::Names;

/// Aligned text.
pub fn text(status: &Status, paper: Paper) -> String {
    let names = Names::of(status, paper.width.is_none());
    let mut page = Page::new(paper);
    head::plugin(&mut page, status);
    attention::say(&mut page, status, &names);
    head::resources(&mut page, status);
    page.gap();
    gpus::lay(&mut page, status, &names);
    page.gap();
    pods::lay(&mut page, status, &names);
    page.finish()
}
