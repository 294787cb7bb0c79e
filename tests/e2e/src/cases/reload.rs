//! The configuration changes under a running pod, without a restart of the plugin.

use anyhow::{Result, ensure};

use super::delivery::check_fill;
use crate::deploy::SHARE_BYTES;
use crate::host::{CONFIG, CONFIGURED};
use crate::pods::Pod;
use crate::suite::Suite;

pub fn configuration_changes_under_a_running_pod(suite: &Suite<'_>) -> Result<()> {
    suite.reconfigure(Some(CONFIG))?;
    let rest = Pod::idle(suite.kubectl, "rest", 1)?;
    let plugin = suite.host("serving")?;
    let outcome = (|| {
        // Eight of 450 MiB each: of the 3840 MiB of the one GPU 900 are held, and six of seven fit beside.
        let eight = CONFIG
            .replace("replicas = 4", "replicas = 8")
            .replace("memory = \"900Mi\"", "memory = \"450Mi\"");
        publish(suite, "1", &eight)?;
        suite.plugin.wait_for_replicas(15)?;
        check_fill(rest.fill(SHARE_BYTES)?, SHARE_BYTES)?;
        let small = Pod::idle(suite.kubectl, "small", 1)?;
        check_fill(small.fill(450 << 20)?, 450 << 20)?;
        small.delete()?;
        // Three of 1200 MiB each: beside what is held, with its limit of before, two fit.
        let three = CONFIG
            .replace("replicas = 4", "replicas = 3")
            .replace("memory = \"900Mi\"", "memory = \"1200Mi\"");
        publish(suite, "2", &three)?;
        suite.plugin.wait_for_free(5)?;
        let large = Pod::idle(suite.kubectl, "large", 1)?;
        check_fill(large.fill(1200 << 20)?, 1200 << 20)?;
        check_fill(rest.fill(SHARE_BYTES)?, SHARE_BYTES)?;
        large.delete()?;
        ensure!(suite.host("serving")? == plugin, "the plugin started again");
        rest.delete()
    })();
    let dir = directory();
    suite.host(&format!("rm -rf {dir}/..1 {dir}/..2 {dir}/..data {CONFIGURED}"))?;
    suite.reconfigure(Some(CONFIG))?;
    outcome
}

fn directory() -> &'static str {
    CONFIGURED.trim_end_matches("/config.toml")
}

/// As kubelet updates a ConfigMap's volume: a new directory, and a link to it that is renamed over the old.
fn publish(suite: &Suite<'_>, version: &str, toml: &str) -> Result<()> {
    let script = format!(
        "cd {} && mkdir -p ..{version} && cat >..{version}/config.toml <<'END'\n{toml}\nEND\n\
         ln -sfn ..{version} ..data_tmp && mv -T ..data_tmp ..data\n\
         [ -L config.toml ] || {{ ln -s ..data/config.toml link && mv -T link config.toml; }}\n",
        directory()
    );
    suite.host(&script).map(drop)
}
