//! The page with a large fleet, in Chromium: `tests/suites/page/checks/bench.py` measures, over `tessera-page-server`.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::report::Report;
use crate::stats::Sample;
use crate::world::World;

/// Nodes, GPUs of each, tenants of each GPU.
const FLEET: [u32; 3] = [200, 8, 10];

/// Measures; nothing where there is no Chromium.
///
/// # Errors
/// The server is not built, or the page does not come to show its fleet.
pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let suite = Path::new(env!("CARGO_MANIFEST_DIR")).join("../suites/page");
    let server = world.artefacts.path("tessera-page-server");
    ensure!(
        server.exists(),
        "no {}: cargo build --release -p tessera-suite-page --bins (make bench does)",
        server.display()
    );
    let mut things = Vec::new();
    for thing in ["page-tools", "chromium"] {
        let setup = Command::new(suite.join("../../setup")).arg(thing).output()?;
        if !setup.status.success() {
            eprint!("not measured: the console; {}", String::from_utf8_lossy(&setup.stderr));
            return Ok(());
        }
        things.push(String::from_utf8(setup.stdout)?.trim().to_owned());
    }
    let out = Command::new(Path::new(&things[0]).join("bin/python"))
        .arg("-B")
        .arg(suite.join("checks/bench.py"))
        .args(FLEET.map(|n| n.to_string()))
        .env("PAGE_SERVER", &server)
        .env("CHROMIUM", &things[1])
        .output()?;
    ensure!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let said: Value = serde_json::from_slice(&out.stdout).context("what bench.py printed")?;
    let sample = |key: &str| -> anyhow::Result<Sample> {
        let list = said[key].as_array().with_context(|| format!("no {key}"))?;
        Ok(Sample::new(list.iter().filter_map(Value::as_f64).collect()))
    };
    let (paint, refresh) = (sample("first_paint_ms")?, sample("refresh_ms")?);
    let what = "200 nodes × 8 GPUs × 10 tenants: first paint";
    report.median("console_first_paint_ms", what, &paint, 1000.0);
    report.median("console_refresh_ms", "every node changes: shown after", &refresh, 2000.0);
    let rss = said["rss_bytes"].as_f64().context("no rss_bytes")? / f64::from(1 << 20);
    report.figure("console_rss_mib", "the server's RSS, at most", "MiB", rss, 150.0);
    Ok(())
}
