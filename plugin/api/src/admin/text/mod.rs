//! `tessera status` for people: what is wrong first, then GPUs, then pods, in as many columns as the paper has.

mod attention;
mod gpus;
mod head;
mod names;
mod pods;
#[cfg(test)]
mod tests;

use tessera_kubelet_api::admin::StatusResponse;

use super::client::Silence;
use crate::print::{Page, Paper};
pub(crate) use gpus::left;
pub(super) use names::Names;

/// Aligned text. `silence`: why it is not the plugin's answer.
pub(super) fn text(status: &StatusResponse, silence: Option<&Silence>, paper: Paper) -> String {
    let names = Names::of(status, paper.width.is_none());
    let mut page = Page::new(paper);
    match silence {
        Some(silence) => head::silent(&mut page, silence, status),
        None => head::plugin(&mut page, status),
    }
    attention::say(&mut page, status, silence.is_some(), &names);
    if silence.is_none() {
        head::resources(&mut page, status);
        page.gap();
        gpus::lay(&mut page, status, &names);
    }
    // What is on no disk is not known to be nowhere.
    if silence.is_none() || !status.allocations.is_empty() {
        page.gap();
        pods::lay(&mut page, status, &names);
    }
    page.finish()
}
