//! A plugin's configuration in the sandbox: the user's own, with this machine's places in it.

use std::net::SocketAddr;
use std::path::Path;

use tessera_fake_kubelet::Kubelet;
use tessera_run::SIM_CONTEXT_OVERHEAD;
use toml::{Table, Value};

use super::dra::Dra;
use super::machine::{RESERVE, Simulation};

/// Sections of a user's configuration that describe a host, and are the sandbox's here.
const OF_THE_HOST: [&str; 4] = ["paths", "pages", "driver", "cdi"];
/// Single keys of the same kind.
const OF_THE_HOST_TOO: [(&str, &str); 7] = [
    ("metrics", "listen"),
    ("api", "listen"),
    ("api", "authorisation"),
    ("api", "tls_cert"),
    ("api", "tls_key"),
    ("container", "device_list_strategy"),
    ("labels", "nfd_file"),
];

/// Where everything of a node is.
#[derive(Clone, Copy, Debug)]
pub struct Places<'a> {
    pub dir: &'a Path,
    pub kubelet: &'a Kubelet,
    pub shim: &'a Path,
    /// The simulated driver; without one, the machine's own.
    pub simulation: Option<&'a Simulation>,
    /// Where DRA drivers register, where claims are served.
    pub dra: Option<&'a Path>,
    /// Where metrics are served; nowhere without.
    pub metrics: Option<SocketAddr>,
    /// Where the API and the page are served; nowhere without.
    pub api: Option<SocketAddr>,
}

/// The configuration's text: what `user` says, but for what describes a host.
pub fn text(mut user: Table, places: &Places<'_>) -> String {
    // What a real machine's GPUs are reached by is its own.
    let nvml = user.get("paths").and_then(|paths| paths.get("nvml")).cloned();
    for section in OF_THE_HOST {
        user.remove(section);
    }
    for (section, key) in OF_THE_HOST_TOO {
        if let Some(table) = user.get_mut(section).and_then(Value::as_table_mut) {
            table.remove(key);
        }
    }
    let path = |path: &Path| Value::from(path.to_string_lossy().into_owned());
    let address = |at: Option<SocketAddr>| at.map_or_else(String::new, |at| at.to_string());
    let at = |name: &str| path(&places.dir.join(name));
    let nvml = match places.simulation {
        Some(simulation) => path(&simulation.nvml()),
        None => nvml.unwrap_or_else(|| "".into()),
    };
    let mut ours = vec![
        ("paths", "kubelet", path(places.kubelet.device_plugins_dir())),
        ("paths", "pod_resources", path(places.kubelet.pod_resources_socket())),
        ("paths", "plugins_registry", places.dra.map_or_else(|| at("registry"), path)),
        ("paths", "dra", at("dra")),
        ("paths", "container_logs", at("logs")),
        ("paths", "pages", at("pages")),
        ("paths", "shim", at("shim")),
        ("paths", "shim_source", path(places.shim)),
        ("paths", "ledger", at("ledger.redb")),
        ("paths", "admin", at("admin.sock")),
        ("paths", "nvml", nvml),
        // The plugin removes specs there that are of no allocation of its own: never those of a real one.
        ("cdi", "directory", path(&Dra::cdi(places.dir))),
        // Root alone may mount one, and nothing here fills a disk.
        ("pages", "tmpfs", "off".into()),
        ("metrics", "listen", address(places.metrics).into()),
        ("api", "listen", address(places.api).into()),
        // One's own machine, and nobody there to ask for rights.
        ("api", "authorisation", "none".into()),
        // Device nodes and driver are the host's own; a process needs neither handed to it.
        ("container", "device_list_strategy", "none".into()),
    ];
    // Nobody at a sandbox waits for minutes.
    let mut defaults = vec![
        ("ledger", "release_after", Value::from("2s")),
        ("health", "recovery", Value::from("5s")),
    ];
    if let Some(simulation) = places.simulation {
        let envs = simulation.envs().map(|(name, file)| (name.to_owned(), path(file)));
        ours.push(("driver", "libraries", path(&simulation.libraries)));
        ours.push(("driver", "env", envs.into_iter().collect::<Table>().into()));
        defaults.push(("gpus", "reserve", RESERVE.to_string().into()));
        defaults.push(("gpus", "context_overhead", SIM_CONTEXT_OVERHEAD.to_string().into()));
    }
    for (section, key, value) in ours {
        if let Some(table) = section_of(&mut user, section) {
            table.insert(key.to_owned(), value);
        }
    }
    for (section, key, value) in defaults {
        if let Some(table) = section_of(&mut user, section) {
            table.entry(key).or_insert(value);
        }
    }
    format!("# Written by `tessera sandbox`.\n{user}")
}

/// Whether the user's configuration sells GPUs by claims.
pub fn serves_claims(user: &Table) -> bool {
    let enabled = user.get("dra").and_then(|dra| dra.get("enabled"));
    enabled.and_then(Value::as_bool).unwrap_or(false)
}

/// What of the user's configuration does not count here, as dotted names.
pub fn set_aside(user: &Table) -> Vec<String> {
    let sections = OF_THE_HOST.iter().filter(|name| user.contains_key(**name));
    let keys = OF_THE_HOST_TOO.iter().filter(|(section, key)| {
        let table = user.get(*section).and_then(Value::as_table);
        table.is_some_and(|table| table.contains_key(*key))
    });
    let keys = keys.map(|(section, key)| format!("{section}.{key}"));
    sections.map(|name| format!("[{name}]")).chain(keys).collect()
}

fn section_of<'a>(whole: &'a mut Table, name: &str) -> Option<&'a mut Table> {
    whole.entry(name).or_insert_with(|| Table::new().into()).as_table_mut()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_config::Config;

    fn own_paths(config: &Config) -> Vec<&Path> {
        let paths = &config.paths;
        [
            &paths.kubelet,
            &paths.pod_resources,
            &paths.plugins_registry,
            &paths.dra,
            &paths.container_logs,
            &paths.pages,
            &paths.shim,
            &paths.ledger,
            &paths.admin,
            &config.cdi.directory,
        ]
        .map(std::path::PathBuf::as_path)
        .to_vec()
    }

    #[tokio::test]
    async fn what_is_written_is_a_configuration_with_the_users_shares_and_our_places() {
        let tmp = tempfile::tempdir().unwrap();
        let kubelet = Kubelet::start(&tmp.path().join("k")).await.unwrap();
        let simulation = Simulation {
            libraries: "/sim".into(),
            config: tmp.path().join("simgpu.toml"),
            state: tmp.path().join("state"),
        };
        let user: Table =
            "[share]\nreplicas = 3\n[paths]\nledger = \"/var/lib/x\"\n[driver]\nroot = \"/run\"\n\
                           [metrics]\nlisten = \":9464\"\n[ledger]\nrelease_after = \"9s\"\n"
                .parse()
                .unwrap();
        assert_eq!(set_aside(&user), ["[paths]", "[driver]", "metrics.listen"]);
        for simulation in [None, Some(&simulation)] {
            let places = Places {
                dir: tmp.path(),
                kubelet: &kubelet,
                shim: Path::new("/shim.so"),
                simulation,
                dra: None,
                metrics: Some("127.0.0.1:4711".parse().unwrap()),
                api: Some("127.0.0.1:4712".parse().unwrap()),
            };
            let text = text(user.clone(), &places);
            let config = Config::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
            assert_eq!(config.share.replicas, 3);
            assert_eq!(config.ledger.release_after, std::time::Duration::from_secs(9));
            for own in own_paths(&config) {
                assert!(own.starts_with(tmp.path()), "{}", own.display());
            }
            assert_eq!(config.paths.shim_source.as_deref(), Some(Path::new("/shim.so")));
            assert_eq!(config.driver.libraries.is_some(), simulation.is_some());
            assert_eq!(config.driver.root, Config::default().driver.root);
            assert_eq!(config.metrics.listen, ["127.0.0.1:4711".parse().unwrap()]);
            assert_eq!(config.api.listen, ["127.0.0.1:4712".parse().unwrap()]);
        }
        kubelet.stop().await;
    }
}
