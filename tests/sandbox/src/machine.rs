//! The simulated machine of a node: its GPUs, as `docs/internals/simulator.md` configures them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;
use tessera_run::{Artefact, find_artefact};

/// What is not sold of each GPU, bytes: what its driver keeps, and `tessera_model::gpu::DRIVER_MARGIN`.
pub const RESERVE: u64 = (551 << 20) + tessera_model::gpu::DRIVER_MARGIN;
/// Most GPUs of a simulated machine.
pub const MOST_GPUS: u32 = 16;

/// GPUs of a node, all alike but for MIG.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    pub gpus: u32,
    /// Memory of each, bytes.
    pub memory: u64,
    pub name: String,
    /// GPUs in MIG mode, and the profiles of their instances.
    pub mig: Vec<Mig>,
}

/// Which GPU is in MIG mode (`None`: each), with which instances: `1g.10gb,2g.20gb`, or `0=1g.10gb,2g.20gb`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mig {
    pub gpu: Option<u32>,
    profiles: Vec<String>,
}

impl std::str::FromStr for Mig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (gpu, list) = match text.split_once('=') {
            Some((gpu, list)) => {
                let number = gpu.trim().parse();
                let wrong = |_| format!("{gpu:?} is not the number of a GPU; write 0=1g.10gb");
                (Some(number.map_err(wrong)?), list)
            }
            None => (None, text),
        };
        let profiles: Vec<String> = list.split(',').map(|one| one.trim().to_owned()).collect();
        let is_one = |one: &String| {
            !one.is_empty() && one.chars().all(|c| c.is_ascii_alphanumeric() || ".+-".contains(c))
        };
        match profiles.iter().find(|one| !is_one(one)) {
            None => Ok(Self { gpu, profiles }),
            Some(wrong) => Err(format!("{wrong:?} is not a profile such as 1g.10gb")),
        }
    }
}

impl Default for Machine {
    /// Two GPUs, small enough that replicas are of a size people know.
    fn default() -> Self {
        Self { gpus: 2, memory: 16 << 30, name: "Simulated GPU".into(), mig: Vec::new() }
    }
}

impl Machine {
    /// The simulator's configuration; UUIDs are of this node alone.
    pub fn toml(&self, node: usize) -> String {
        let name = toml::Value::from(self.name.clone());
        let mut text = String::new();
        for gpu in 0..self.gpus {
            text += &format!(
                "[[gpu]]\nname = {name}\nmemory = {}\nuuid = \
                 \"GPU-5e55e4a0-{node:04x}-4000-8000-{gpu:012x}\"\npci_bus_id = \"0000:{:02x}:00.0\"\n\
                 minor = {gpu}\n",
                self.memory,
                0x17 + 8 * gpu
            );
            let mig = self.mig.iter().rev().find(|mig| mig.gpu.is_none_or(|one| one == gpu));
            if let Some(mig) = mig {
                text += &format!("mig = {}\n", toml::Value::from(mig.profiles.clone()));
            }
            text += "\n";
        }
        // The kernel of tessera-tenant takes its duration as an argument.
        text + "[[kernel]]\nname = \"spin_ns\"\nparameter = 0\n"
    }
}

/// A simulated machine on the disk.
#[derive(Clone, Debug)]
pub struct Simulation {
    /// Where the simulated driver's libraries are.
    pub libraries: PathBuf,
    /// Its configuration's file.
    pub config: PathBuf,
    /// Its state's file.
    pub state: PathBuf,
}

impl Simulation {
    /// Where they are for a node in `dir`.
    pub fn of(dir: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            libraries: find_artefact(Artefact::Simulation, None)?,
            config: dir.join("simgpu.toml"),
            state: dir.join("simgpu.state"),
        })
    }

    /// The variables by which a process finds the machine.
    pub fn envs(&self) -> [(&'static str, &Path); 2] {
        [("SIMGPU_CONFIG", &self.config), ("SIMGPU_STATE", &self.state)]
    }

    /// NVML's library.
    pub fn nvml(&self) -> PathBuf {
        self.libraries.join("libnvidia-ml.so.1")
    }

    /// Runs the simulator's own control program; what it prints.
    pub fn control(&self, args: &[&str]) -> anyhow::Result<String> {
        let program = self.libraries.join("simgpu-ctl");
        let mut command = Command::new(&program);
        command.args(args).envs(self.envs()).stdin(Stdio::null());
        let output = command.output().with_context(|| {
            format!("{} cannot be run; `make debug` makes it", program.display())
        })?;
        let said = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(output.status.success(), "{}", said.trim_end());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_gpus_of_their_own() {
        let machine = Machine { gpus: 3, ..Machine::default() };
        let uuids = |node| -> Vec<String> {
            let table: toml::Table = machine.toml(node).parse().unwrap();
            let gpus = table["gpu"].as_array().unwrap();
            gpus.iter().map(|gpu| gpu["uuid"].as_str().unwrap().to_owned()).collect()
        };
        let (a, b) = (uuids(0), uuids(1));
        assert_eq!(a.len(), 3);
        assert!(a.iter().all(|uuid| !b.contains(uuid)), "{a:?} {b:?}");
        assert_ne!(a[0], a[1]);
    }

    #[test]
    fn mig_is_said_for_one_gpu_or_for_all() {
        // Attributes of profiles, as `nvidia-smi mig -lgip` lists them.
        for profile in ["1g.10gb+me", "1g.24gb+gfx", "1g.24gb+me.all", "1g.24gb-me"] {
            let parsed = profile.parse::<Mig>();
            assert!(parsed.is_ok(), "{profile}: {parsed:?}");
        }
        let mig = vec!["1g.10gb".parse().unwrap(), "1=2g.20gb,1g.10gb".parse().unwrap()];
        let table: toml::Table = Machine { mig, ..Machine::default() }.toml(0).parse().unwrap();
        let profiles = |gpu: usize| table["gpu"][gpu]["mig"].as_array().unwrap().len();
        assert_eq!((profiles(0), profiles(1)), (1, 2));
        for wrong in ["", "x=1g.10gb", "1g 10gb", "1g.10gb,"] {
            assert!(wrong.parse::<Mig>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_name_with_quotes_stays_a_name() {
        let name = "a \"b\"\n[[gpu]]".to_owned();
        let table: toml::Table =
            Machine { name: name.clone(), ..Machine::default() }.toml(0).parse().unwrap();
        assert_eq!(table["gpu"].as_array().unwrap().len(), 2);
        assert_eq!(table["gpu"][0]["name"].as_str(), Some(name.as_str()));
    }
}
