//! The driver, kubelet or the node goes and comes back under claims.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::cases::delivery::check_fill;
use crate::cases::rollout::{filled, wait_until_over};
use crate::deploy::CONTEXT_BYTES;
use crate::dra::claims::{self, Claim, Source};
use crate::dra::mode;
use crate::host;
use crate::pods::{Container, Pod, Restart};
use crate::suite::{Server, Suite};
use crate::wait::{self, Look};

/// Where container runtimes look for CDI specifications that do not outlive a reboot.
const CDI: &str = "/var/run/cdi";

/// A server and a quiet pod with shares of claims, which nothing may disturb.
struct Running<'a> {
    server: Server<'a>,
    quiet: Pod<'a>,
    quiet_before: (u64, String),
}

impl<'a> Running<'a> {
    fn start(suite: &Suite<'a>) -> Result<Self> {
        mode::published(suite)?;
        Claim::share("768Mi", 20).create_template(suite, "server")?;
        let main = [Server::container(0).claiming(None)];
        let server = claims::create(suite, "server", Source::Template("server"), &main)?;
        let quiet = claims::pod(suite, "quiet", &Claim::share("1536Mi", 30))?;
        server.wait_until_running()?;
        let quiet_before = quiet.incarnation()?;
        Ok(Self { server: Server::serving(server)?, quiet, quiet_before })
    }

    fn check_untouched(&self) -> Result<()> {
        self.server.check_untouched()?;
        self.quiet.check_incarnation(&self.quiet_before)?;
        // A process that first meets CUDA now, in a container from before.
        check_fill(self.quiet.fill(1536 << 20)?, 1536 << 20)
    }

    /// After all of it: what is sold is what is claimed, and new claims are served.
    fn check_served(&self, suite: &Suite<'_>, name: &str) -> Result<()> {
        let pod = claims::pod(suite, name, &Claim::share("512Mi", 10))?;
        check_fill(pod.fill(512 << 20)?, 512 << 20)?;
        self.check_untouched()?;
        let sold = sold(suite)?;
        let want = (768 + 1536 + 512) << 20;
        ensure!(sold == want, "{sold} bytes are sold, {want} are claimed");
        pod.end()
    }
}

fn sold(suite: &Suite<'_>) -> Result<u64> {
    let status = suite.plugin.status()?;
    let gpus = status["gpus"].as_array().context("gpus")?;
    Ok(gpus.iter().filter_map(|gpu| gpu["memory_limits_bytes"].as_u64()).sum())
}

fn published_names(suite: &Suite<'_>) -> Result<Vec<String>> {
    let mut names: Vec<_> = mode::published(suite)?.into_iter().map(|device| device.name).collect();
    names.sort();
    Ok(names)
}

/// Creates the pod of a number that takes all of a claim of this template, and ends.
fn create_brief(suite: &Suite<'_>, template: &str, n: usize, memory: &str) -> Result<()> {
    let main = [Container::greedy_once(0, memory).claiming(None)];
    let (name, source) = (format!("{template}-{n}"), Source::Template(template));
    suite.kubectl.create_pod(&claims::manifest(&name, Restart::Never, source, &main))
}

/// Waits until so many of them are over, and checks that each had its quota.
fn check_brief(suite: &Suite<'_>, template: &str, count: usize, bytes: u64) -> Result<()> {
    for pod in wait_until_over(suite, &format!("{template}-"), count)? {
        ensure!(pod["status"]["phase"] == "Succeeded", "{}", pod["status"]);
        check_fill(filled(&pod)?, bytes)?;
    }
    Ok(())
}

/// A pod whose claim kubelet asks for while there is no driver waits, and one that ends does so when it is back.
pub fn dra_driver_is_away_while_pods_come_and_go(suite: &Suite<'_>) -> Result<()> {
    suite.plugin.supervise()?;
    let running = Running::start(suite)?;
    let going = claims::pod(suite, "going", &Claim::share("512Mi", 10))?;
    suite.hold_plugin()?;
    let outcome = (|| {
        going.delete()?;
        let coming = claims::waiting(suite, "coming", &Claim::share("512Mi", 10))?;
        wait::until("kubelet says why the pod waits", wait::LIMIT, || {
            let text = Value::from(suite.events_of("coming")?).to_string();
            Ok(Look::when(text.contains("FailedPrepareDynamicResources"), text))
        })?;
        anyhow::Ok(coming)
    })();
    suite.release_plugin()?;
    let coming = outcome?;
    coming.wait_until_running()?;
    check_fill(coming.fill(512 << 20)?, 512 << 20)?;
    going.wait_until_gone()?;
    coming.end()?;
    running.check_served(suite, "after")
}

/// Kubelet removes the node's slices when it starts, and asks again for every claim.
pub fn dra_kubelet_restarts_under_claims(suite: &Suite<'_>) -> Result<()> {
    let running = Running::start(suite)?;
    let before = published_names(suite)?;
    for round in 0..2 {
        suite.restart_kubelet()?;
        running.check_served(suite, &format!("round-{round}"))?;
        ensure!(published_names(suite)? == before);
    }
    // A pod that is deleted while kubelet is away.
    let going = claims::pod(suite, "going", &Claim::share("512Mi", 10))?;
    suite.stop_kubelet()?;
    going.delete()?;
    suite.start_kubelet()?;
    going.wait_until_gone()?;
    running.check_served(suite, "last")
}

/// `maxSurge: 1`: the new driver serves before the old one ends. No pod is refused, none waits for long.
pub fn dra_driver_is_updated_while_claims_come(suite: &Suite<'_>) -> Result<()> {
    let running = Running::start(suite)?;
    let template = Claim::share("256Mi", 5);
    template.create_template(suite, "coming")?;
    suite.plugin.begin_roll_out(&json!({}))?;
    for n in 0..8 {
        create_brief(suite, "coming", n, "256Mi")?;
        thread::sleep(Duration::from_millis(700));
    }
    suite.plugin.wait_for_roll_out()?;
    check_brief(suite, "coming", 8, 256 << 20)?;
    mode::published(suite)?;
    running.check_served(suite, "after")
}

/// Pages and CDI files lie in memory and are gone; what is on disk is there. Kubelet starts the pods again: once
/// with the driver as early as itself, and once with the driver so late that pods surely wait for it. Either way
/// each has its quota again, on the GPU that the scheduler chose, and no container starts without one.
pub fn dra_node_reboot_gives_every_claim_its_quota_again(suite: &Suite<'_>) -> Result<()> {
    suite.plugin.supervise()?;
    let running = Running::start(suite)?;
    Claim::share("512Mi", 10).create(suite, "common")?;
    let pair = ["pair-a", "pair-b"].map(|name| claims::idle(suite, name, Source::Shared("common")));
    let [a, b] = pair;
    let (a, b) = (a?, b?);
    let pods = [&running.server.pod, &running.quiet, &a, &b];
    let want = [768 << 20, 1536 << 20, 512 << 20, 512 << 20];
    for late in [false, true] {
        let before = pods.iter().map(|pod| Ok((pod.incarnation()?.0, pod.gpu()?.uuid)));
        let before = before.collect::<Result<Vec<_>>>()?;
        suite.stop_kubelet()?;
        if late {
            suite.host(&format!("touch {}", host::HOLD))?;
        }
        suite.power_off()?;
        suite.host(&format!("rm -f {CDI}/tessera.dev-*"))?;
        suite.start_kubelet()?;
        if late {
            wait::until("kubelet waits for the driver", wait::LIMIT, || {
                let text = Value::from(suite.events_of("quiet")?).to_string();
                Ok(Look::when(text.contains("is not registered"), text))
            })?;
            pods.iter().try_for_each(|pod| pod.check_refused())?;
            suite.release_plugin()?;
        }
        for ((pod, (restarts, uuid)), want) in pods.iter().zip(&before).zip(want) {
            pod.wait_for_restart(*restarts)?;
            let gpu = pod.gpu()?;
            ensure!(
                gpu.uuid == *uuid && gpu.total == want,
                "late: {late}: {gpu:?}, not {uuid} with {want}"
            );
        }
        running.server.wait_until_serving()?;
        check_fill(running.quiet.fill(1536 << 20)?, 1536 << 20)?;
        check_fill(a.fill(512 << 20)?, 512 << 20)?;
        let sold = sold(suite)?;
        ensure!(sold == (768 + 1536 + 512) << 20, "{sold} bytes are sold");
        mode::published(suite)?;
    }
    let next = claims::pod(suite, "next", &Claim::share("256Mi", 5))?;
    ensure!(next.gpu()?.free == (256 << 20) - CONTEXT_BYTES, "{:?}", next.gpu()?);
    Ok(())
}
