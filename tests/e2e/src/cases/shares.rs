//! Unequal shares, under a resource name for each size.

use anyhow::{Context, Result, ensure};

use super::delivery::check_fill;
use crate::deploy::{NAMESPACE, REPLICAS, RESOURCE};
use crate::host::CONFIG;
use crate::pods::{Container, Pod, Restart};
use crate::suite::Suite;
use crate::wait::{self, Look};

pub const LARGE: &str = "tessera.dev/gpu-large";
const LARGE_BYTES: u64 = 1 << 30;

/// The first GPU as four of 600 MiB and one of 1 GiB. As many `tessera.dev/gpu` as before, so that the
/// other helpers find what they wait for.
const LAYOUT: &str = r#"
[[layout]]
gpus = ["GPU-e2e00000-0000-4000-8000-000000000000"]
shares = [
  { resource = "tessera.dev/gpu", count = 4, memory = "600Mi", cores = "100m" },
  { resource = "tessera.dev/gpu-large", memory = "1Gi", cores = "50%" },
]
"#;

pub fn unequal_shares_are_sold_and_held_by_name(suite: &Suite<'_>) -> Result<()> {
    with_layout(suite, LAYOUT, REPLICAS, || {
        let large =
            Pod::start(suite.kubectl, "large", Container::idle("main", 0).asking(&[(LARGE, 1)]))?;
        check_fill(large.fill(LARGE_BYTES)?, LARGE_BYTES)?;
        // All of the first GPU beside it, and all of the second.
        let four = Pod::idle(suite.kubectl, "four", 4)?;
        let other = Pod::idle(suite.kubectl, "other", 4)?;
        let uuid = large.gpu()?.uuid;
        let (beside, alone) = if four.gpu()?.uuid == uuid { (four, other) } else { (other, four) };
        ensure!(alone.gpu()?.uuid != uuid, "both on one GPU");
        check_fill(beside.fill(4 * (600 << 20))?, 4 * (600 << 20))?;
        // Kubelet reports holders a moment later.
        let status = wait::until("status names all three", wait::LIMIT, || {
            let status = suite.plugin.status()?;
            let allocations = status["allocations"].as_array().context("allocations")?;
            let mut names: Vec<_> = allocations
                .iter()
                .map(|a| (a["holder"]["pod"].to_string(), a["resource_name"].to_string()))
                .collect();
            names.sort();
            let want = [("four", RESOURCE), ("large", LARGE), ("other", RESOURCE)]
                .map(|(pod, resource)| (format!("\"{pod}\""), format!("\"{resource}\"")));
            Ok(if names == want { Look::Done(status) } else { Look::NotYet(format!("{names:?}")) })
        })?;
        ensure!(status["plugin"]["registration"] == "live", "{status}");
        Ok(())
    })
}

pub fn container_with_two_of_our_resources_is_refused(suite: &Suite<'_>) -> Result<()> {
    with_layout(suite, LAYOUT, REPLICAS, || {
        let greedy = Container::idle("main", 0).asking(&[(LARGE, 1), (RESOURCE, 1)]);
        let greedy = Pod::create(suite.kubectl, "greedy", Restart::Always, &[], &[greedy])?;
        wait::until("the start is refused", wait::LIMIT, || {
            let field = "involvedObject.name=greedy";
            let events =
                suite.kubectl.get(&["events", "-n", NAMESPACE, "--field-selector", field])?;
            let text = events["items"].to_string();
            Ok(Look::when(text.contains("can hold only one of Tessera's resources"), text))
        })?;
        let status = greedy.object()?["status"].clone();
        ensure!(status["phase"] == "Pending", "it runs: {status}");
        // One each in two containers is no such thing. Nothing of the pod runs that would take time to end.
        greedy.forget()?;
        let one = Container::idle("one", 0).asking(&[(LARGE, 1)]);
        let pair = Pod::create(
            suite.kubectl,
            "pair",
            Restart::Always,
            &[],
            &[one, Container::idle("two", 1)],
        )?;
        pair.wait_until_running()?;
        ensure!(pair.gpus("one")?.len() == 1 && pair.gpus("two")?.len() == 1);
        Ok(())
    })
}

/// Runs `case` with `layout` added to the configuration, once the node offers one [`LARGE`] and
/// `replicas` of the usual resource.
pub fn with_layout(
    suite: &Suite<'_>,
    layout: &str,
    replicas: u64,
    case: impl FnOnce() -> Result<()>,
) -> Result<()> {
    suite.reconfigure(Some(&format!("{CONFIG}{layout}")))?;
    let outcome = wait::until("the node offers the large share", wait::LIMIT, || {
        let node = suite.kubectl.get(&["node", &suite.node])?;
        let offered = node["status"]["allocatable"][LARGE].clone();
        Ok(Look::when(offered == "1", offered.to_string()))
    })
    .and_then(|()| suite.plugin.wait_for_replicas(replicas))
    .and_then(|()| case());
    suite.remove_tenants()?;
    suite.reconfigure(None)?;
    suite.plugin.wait_for_replicas(REPLICAS)?;
    outcome
}
