//! Both front ends on one node, and a GPU that moves from one to the other.

use anyhow::{Result, ensure};

use crate::cases::delivery::check_fill;
use crate::deploy::{REPLICAS, SHARE_BYTES};
use crate::dra::claims::{self, Claim};
use crate::dra::{mode, slices};
use crate::host::CONFIG;
use crate::pods::Pod;
use crate::suite::Suite;
use crate::wait::{self, Look};

/// The second GPU.
const SECOND: &str = "GPU-e2e00000-0000-4000-8000-000000000001";

fn selling(gpus: &str) -> String {
    format!(
        "{CONFIG}{}",
        mode::ALL.replace("enabled = true", &format!("enabled = true\ngpus = [{gpus}]"))
    )
}

/// A GPU is sold by one front end at a time. One that is to go over is withdrawn at once, and is sold by the other
/// when its last allocation has ended.
pub fn dra_and_device_plugin_sell_a_gpu_each_and_one_moves(suite: &Suite<'_>) -> Result<()> {
    mode::published(suite)?;
    let outcome = move_over(suite);
    suite.remove_tenants()?;
    suite.plugin.set_offers(0);
    suite.reconfigure(None)?;
    suite.plugin.wait_until_offered()?;
    outcome
}

fn move_over(suite: &Suite<'_>) -> Result<()> {
    let half = REPLICAS / 2;
    let only_second = |devices: &[slices::Device]| devices.len() == 1 && devices[0].uuid == SECOND;
    suite.plugin.set_offers(half);
    suite.reconfigure(Some(&selling(&format!("\"{SECOND}\""))))?;
    slices::wait_for(suite, "the second GPU alone is published", only_second)?;
    suite.plugin.wait_until_offered()?;

    let counted = Pod::idle(suite.kubectl, "counted", 1)?;
    let claimed = claims::pod(suite, "claimed", &Claim::share("1Gi", 25))?;
    ensure!(claimed.gpu()?.uuid == SECOND && counted.gpu()?.uuid != SECOND);
    check_fill(counted.fill(SHARE_BYTES)?, SHARE_BYTES)?;
    check_fill(claimed.fill(1 << 30)?, 1 << 30)?;

    // The first goes over to claims: not while a counted share of it is held.
    suite.plugin.set_offers(0);
    suite.reconfigure(Some(&selling("\"*\"")))?;
    wait::until("no counted share can be had", wait::LIMIT, || {
        let now = suite.plugin.allocatable()?;
        Ok(Look::when(now <= 1, format!("{now} replicas")))
    })?;
    let full = claims::waiting(suite, "full", &Claim::share("3Gi", 50))?;
    claims::wait_until_refused(&full, "cannot allocate all claims")?;
    ensure!(only_second(&slices::devices(suite)?), "a GPU is sold twice");
    check_fill(counted.fill(SHARE_BYTES)?, SHARE_BYTES)?;
    counted.delete()?;
    full.wait_until_running()?;
    ensure!(full.gpu()?.uuid != SECOND, "{:?}", full.gpu()?);
    check_fill(full.fill(3 << 30)?, 3 << 30)?;
    check_fill(claimed.fill(1 << 30)?, 1 << 30)?;

    // And back: not while a claim of it is held.
    suite.plugin.set_offers(half);
    suite.reconfigure(Some(&selling(&format!("\"{SECOND}\""))))?;
    slices::wait_for(suite, "the first GPU is no longer published", only_second)?;
    ensure!(suite.plugin.allocatable()? == 0, "a GPU is sold twice");
    check_fill(full.fill(3 << 30)?, 3 << 30)?;
    full.delete()?;
    suite.plugin.wait_until_offered()?;
    let counted = Pod::idle(suite.kubectl, "again", 4)?;
    check_fill(counted.fill(4 * SHARE_BYTES)?, 4 * SHARE_BYTES)?;
    check_fill(claimed.fill(1 << 30)?, 1 << 30)
}
