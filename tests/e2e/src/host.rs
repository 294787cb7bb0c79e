//! What happens to a node, done to it from outside every container.

use anyhow::{Result, ensure};

use crate::deploy::{PAGES_ON_NODE, SIM_ON_NODE};
use crate::suite::Suite;
use crate::wait::{self, Look};

/// Where the node keeps ledger and shims, as in the manifest.
const STATE_ON_NODE: &str = "/var/lib/tessera";

/// While it is there, the plugin's supervisor starts none; see [`crate::deploy::Plugin::supervise`].
pub const HOLD: &str = "/var/lib/tessera-e2e/hold";

/// The configuration of a supervised plugin, where there is one; see [`Suite::reconfigure`].
pub const CONFIGURED: &str = "/var/lib/tessera-e2e/config.toml";

pub const CONFIG: &str = include_str!("../overlay/config.toml");

/// `serving`: the plugin's pids. `contained`: those of every container. Only what a cluster started:
/// other plugins may run on this machine.
const FUNCTIONS: &str = r#"
shopt -s nullglob
contained() { local p; for p in /proc/[0-9]*; do grep -qs kubepods $p/cgroup && echo ${p#/proc/}; done; true; }
serving() {
    local p comm
    for p in /proc/[0-9]*; do
        { read -r comm <$p/comm; } 2>/dev/null || continue
        [ "$comm" = tessera ] && grep -qs kubepods $p/cgroup || continue
        case "$(tr '\0' ' ' <$p/cmdline 2>/dev/null)" in "tessera serve"* | "tessera -c /etc/tessera/"* | "tessera -c $sim/"*) echo ${p#/proc/} ;; esac
    done
}
"#;

impl Suite<'_> {
    /// Runs a bash script on the node, which may use `serving` and `contained`.
    pub fn host(&self, script: &str) -> Result<String> {
        let head =
            format!("{FUNCTIONS}\npages={PAGES_ON_NODE} state={STATE_ON_NODE} sim={SIM_ON_NODE}");
        self.cluster.on_host(&self.node, &format!("{head}\n{script}"))
    }

    pub fn signal_plugin(&self, signal: &str) -> Result<()> {
        let script = format!("p=$(serving); [ -n \"$p\" ] && kill -{signal} $p");
        self.host(&script).map(drop)
    }

    /// Kills the plugin and keeps it away, whatever kubelet does; needs a supervised one.
    pub fn hold_plugin(&self) -> Result<()> {
        self.host(&format!("touch {HOLD}; kill -9 $(serving)"))?;
        wait::until("the plugin is away", wait::LIMIT, || {
            let pids = self.host("serving")?;
            Ok(Look::when(pids.is_empty(), pids))
        })
    }

    pub fn release_plugin(&self) -> Result<()> {
        self.host(&format!("rm -f {HOLD}")).map(drop)
    }

    /// Every container dies and the pages' tmpfs is gone, as when the power fails; what is on disk
    /// stays. Kubelet has to be stopped.
    pub fn power_off(&self) -> Result<()> {
        let left = self.host(
            "for ((i = 0; i < 300; i++)); do
                 all=$(contained); [ -n \"$all\" ] || break
                 kill -9 $all 2>/dev/null || true; sleep 0.2
             done
             while grep -q \" $pages .* - tmpfs \" /proc/self/mountinfo; do umount -l $pages; done
             rm -rf $pages/* $sim/state; contained",
        )?;
        ensure!(left.is_empty(), "processes survive: {left}");
        Ok(())
    }

    /// Kills every process whose cgroup is named like one of these patterns of grep's, and waits until
    /// there has been none for a second: a worker of kubelet's that has not heard yet that the pod is gone
    /// starts its containers once more, half a second later.
    pub fn kill_all_of(&self, cgroups: &str) -> Result<()> {
        let left = self.host(&format!(
            "none=0
             for ((i = 0; i < 300 && none < 10; i++)); do
                 all=$(cd /proc && grep -sl {cgroups} [0-9]*/cgroup || true)
                 none=$((none + 1)); [ -z \"$all\" ] || none=0
                 for p in $all; do kill -9 ${{p%/cgroup}} 2>/dev/null || true; done; sleep 0.1
             done; echo $all"
        ))?;
        ensure!(left.trim().is_empty(), "processes survive: {left}");
        Ok(())
    }

    /// Gives the plugin another configuration, or the one it was deployed with, and waits until it is
    /// registered with it. By a restart of its process alone: roll-outs are for cases to try.
    pub fn reconfigure(&self, toml: Option<&str>) -> Result<()> {
        self.plugin.supervise()?;
        let script = match toml {
            Some(toml) => format!("cat >{CONFIGURED} <<'END'\n{toml}\nEND\n"),
            None => format!("rm -f {CONFIGURED}\n"),
        };
        // In an orderly way, as kubelet ends it.
        let old = self.host(&format!("{script} p=$(serving); kill $p; echo $p"))?;
        wait::until("the plugin is registered again", wait::LIMIT, || {
            let now = self.host("serving")?;
            if now.trim().is_empty() || now == old {
                return Ok(Look::NotYet("no new plugin".to_owned()));
            }
            let output = self.plugin.try_exec(&["tessera", "status", "--ready"])?;
            Ok(Look::when(output.code == Some(0), output.stderr))
        })
    }

    /// The names of the allocations' directories, and of what is left of removed ones.
    pub fn directories(&self) -> Result<Vec<String>> {
        let list = self.host("ls -A $pages")?;
        Ok(list.lines().filter(|name| *name != ".spare").map(str::to_owned).collect())
    }
}
