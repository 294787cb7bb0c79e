//! Several containers, pods or shares of one claim.

use anyhow::{Result, ensure};

use crate::cases::delivery::check_fill;
use crate::deploy::CONTEXT_BYTES;
use crate::dra::claims::{self, Claim, Request, Source};
use crate::dra::mode;
use crate::pods::Container;
use crate::suite::Suite;
use crate::wait::{self, Look};

const GIB: u64 = 1 << 30;
const HELD: u64 = 300 << 20;

fn holder(name: &str) -> Container {
    Container::new(name, 0, &["tessera-tenant", "hold", "--bytes", "300Mi"])
}

/// Two requests are two shares: containers that name one each are held apart, one that names both has their sum.
pub fn dra_two_shares_of_one_gpu_are_held_apart_or_add_up(suite: &Suite<'_>) -> Result<()> {
    mode::published(suite)?;
    let two =
        Claim::of(&[Request::share("chat", "1Gi", 20), Request::share("embed", "1536Mi", 30)])
            .constrained("matchAttribute");
    two.create_template(suite, "two")?;
    let apart = [
        holder("chat").claiming(Some("chat")),
        Container::idle("embed", 0).claiming(Some("embed")),
        Container::idle("neither", 0),
    ];
    let pod = claims::create(suite, "apart", Source::Template("two"), &apart)?;
    pod.wait_until_running()?;
    pod.wait_for_event("chat", "ready")?;
    let (chat, embed) = (pod.gpus("chat")?, pod.gpus("embed")?);
    ensure!(chat.len() == 1 && chat[0].total == GIB, "{chat:?}");
    ensure!(chat[0].free == GIB - HELD - 2 * CONTEXT_BYTES, "{chat:?}");
    ensure!(embed.len() == 1 && embed[0].total == 1536 << 20, "{embed:?}");
    ensure!(embed[0].free == (1536 << 20) - CONTEXT_BYTES, "counts its neighbour: {embed:?}");
    ensure!(embed[0].uuid == chat[0].uuid, "two GPUs: {chat:?}, {embed:?}");
    ensure!(pod.gpus("neither").is_err(), "a container that names no request has a GPU");

    let both = claims::idle(suite, "both", Source::Template("two"))?;
    let gpu = both.gpu()?;
    ensure!(gpu.total == GIB + (1536 << 20), "{gpu:?}");
    check_fill(both.fill(GIB + (1536 << 20))?, GIB + (1536 << 20))
}

/// Pods that name one claim have one quota, until the last of them is gone.
pub fn dra_claim_is_shared_by_pods(suite: &Suite<'_>) -> Result<()> {
    mode::published(suite)?;
    Claim::share("1Gi", 25).create(suite, "common")?;
    let first =
        claims::create(suite, "first", Source::Shared("common"), &[holder("main").claiming(None)])?;
    first.wait_until_running()?;
    first.wait_for_event("main", "ready")?;
    let before = first.incarnation()?;
    let second = claims::idle(suite, "second", Source::Shared("common"))?;
    ensure!(second.gpu()?.uuid == first.gpu()?.uuid);
    let gpu = second.gpu()?;
    ensure!(gpu.total == GIB && gpu.free == GIB - HELD - 2 * CONTEXT_BYTES, "{gpu:?}");
    check_fill(second.fill(GIB)? + HELD + CONTEXT_BYTES, GIB)?;

    second.end()?;
    ensure!(first.incarnation()? == before && first.gpu()?.total == GIB);
    let third = claims::idle(suite, "third", Source::Shared("common"))?;
    check_fill(third.fill(GIB)? + HELD + CONTEXT_BYTES, GIB)?;
    first.end()?;
    third.end()?;
    wait::until("the share is given back", wait::LIMIT, || {
        let left = suite.plugin.status()?["allocations"].clone();
        Ok(Look::when(left.as_array().is_some_and(Vec::is_empty), left.to_string()))
    })
}
