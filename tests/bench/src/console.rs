//! The page with a large fleet, in Chromium: `tests/suites/page/checks/bench.py` measures, over `tessera-page-server`.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::stats::Sample;
use crate::world::World;

/// Nodes, GPUs of each, tenants of each GPU.
pub const FLEET: [u32; 3] = [200, 8, 10];

/// What was measured.
#[derive(Debug)]
pub struct Figures {
    /// From the navigation to rows on the screen, milliseconds.
    pub first_paint_ms: Sample,
    /// From a change of every node to the page that shows it, milliseconds.
    pub refresh_ms: Sample,
    /// The longest time in a refresh for which the page answered no key, milliseconds.
    pub longest_task_ms: Sample,
    /// The most that was resident in the server, MiB.
    pub rss_mib: f64,
}

/// Measures; `None` where there is no Chromium.
///
/// # Errors
/// The server is not built, or the page does not come to show its fleet.
pub fn run(world: &World) -> anyhow::Result<Option<Figures>> {
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
            return Ok(None);
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
    Ok(Some(Figures {
        first_paint_ms: sample("first_paint_ms")?,
        refresh_ms: sample("refresh_ms")?,
        longest_task_ms: sample("longest_task_ms")?,
        rss_mib: said["rss_bytes"].as_f64().context("no rss_bytes")? / f64::from(1 << 20),
    }))
}
