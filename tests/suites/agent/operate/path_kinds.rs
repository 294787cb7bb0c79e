//! Whatever lies at a configured path, a pipe, a device, a socket, far too large a file: the plugin starts, or says
//! which path it is, in bounded time and memory. By every key of the configuration that is a path.

use tessera_config::keys;
use tessera_harness::plugin::{Simulated, until};

use crate::adversity::wedged::make;

const KINDS: [&str; 7] = ["fifo", "zero", "directory", "socket", "sparse", "missing", "unreadable"];

/// Most bytes of memory that the plugin may ever have had.
const MOST: u64 = 256 << 20;

/// Keys that are paths, with what they belong to. What a mount of containers names the plugin does not open.
fn paths() -> Vec<String> {
    let rows = keys::rows();
    let is_path = |accepts: &str| accepts.starts_with("absolute path");
    let paths = rows.iter().filter(|row| is_path(&row.accepts) && !row.key.contains('['));
    paths.map(|row| row.key.clone()).collect()
}

/// The configuration with another value of a key.
fn with(text: &str, key: &str, value: &str) -> String {
    let (section, name) = key.rsplit_once('.').unwrap();
    let (header, line) = (format!("[{section}]"), format!("{name} = {value}"));
    let mut lines: Vec<&str> = text.lines().collect();
    let Some(at) = lines.iter().position(|line| *line == header) else {
        return format!("{text}\n{header}\n{line}\n");
    };
    let end = lines.iter().skip(at + 1).position(|line| line.starts_with('['));
    let end = end.map_or(lines.len(), |more| at + 1 + more);
    let begin = format!("{name} = ");
    let old = (at + 1..end).find(|index| lines[*index].starts_with(&begin));
    match old {
        Some(index) => lines[index] = &line,
        None => lines.insert(at + 1, &line),
    }
    lines.join("\n")
}

/// Starts the plugin with such a thing at this key's path, and gives what is wrong with what becomes of it.
async fn try_out(key: String, kind: &'static str) -> Result<(), String> {
    let is_tls = key.starts_with("api.tls");
    let mut node = Simulated::new("replicas = 2").await;
    let odd = node.dir.path().join("odd");
    let _kept = make(kind, &odd);
    let config = node.file();
    let mut text = std::fs::read_to_string(&config).unwrap();
    if is_tls {
        let made = tessera_web::self_signed(&["localhost"]).unwrap();
        let files = [("api.tls_cert", made.certificate.pem()), ("api.tls_key", made.key_pem())];
        for (key, pem) in files {
            let path = node.dir.path().join(key);
            std::fs::write(&path, pem).unwrap();
            text = with(&text, key, &format!("{path:?}"));
        }
        text = with(&text, "api.listen", "\"127.0.0.1:0\"");
    }
    std::fs::write(&config, with(&text, &key, &format!("{odd:?}"))).unwrap();
    node.launch();
    let pid = node.plugin.as_ref().unwrap().id();
    let named = odd.display().to_string();
    let mut memory = 0;
    let ended = until(|| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let peak = peak.and_then(|text| text.trim().trim_end_matches(" kB").parse::<u64>().ok());
        memory = memory.max(peak.unwrap_or(0) << 10);
        if node.plugin.as_mut().unwrap().try_wait().unwrap().is_some() {
            return Some(true);
        }
        let output = node.run(&["status", "-o", "json"]);
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        let said = [&json["warnings"], &json["plugin"]];
        let is_said = said.iter().any(|said| said.to_string().contains(&named));
        let is_live = json["plugin"]["registration"] == "live";
        (is_said || is_live && !is_tls).then_some(false)
    })
    .await;
    let log = std::fs::read_to_string(node.dir.path().join("log")).unwrap_or_default();
    match (ended, memory) {
        (_, MOST..) => Err(format!("{key} {kind}: {} MiB", memory >> 20)),
        (true, _) if !log.contains(&named) => {
            Err(format!("{key} {kind}: it ended without a word: {log}"))
        }
        _ => Ok(()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_path_of_the_configuration_holds_the_plugin_up_or_takes_its_memory() {
    let paths = paths();
    assert!(paths.len() > 15 && paths.iter().any(|key| key == "api.tls_cert"), "{paths:?}");
    let mut faults = Vec::new();
    for key in paths {
        let mut tries = tokio::task::JoinSet::new();
        for kind in KINDS {
            tries.spawn(try_out(key.clone(), kind));
        }
        while let Some(tried) = tries.join_next().await {
            faults.extend(
                tried.map_err(|error| format!("{key}: {error}")).and_then(|tried| tried).err(),
            );
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
