//! `simgpu-ctl`: looks at the simulated GPUs, and makes things happen to them.

use simgpu::Session;
use std::process::ExitCode;

const USAGE: &str = "\
usage: simgpu-ctl COMMAND

  status              GPUs, processes, memory, GPU time (SIMGPU_STATE names the state)
  xid GPU CODE        inject an XID error
  lose GPU            make a GPU fall off the bus (XID 79)
  restore GPU         bring it back
  config              print the configuration that the state was created with
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            eprintln!("{text}");
            ExitCode::from(if text == USAGE { 64 } else { 1 })
        }
    }
}

fn run(args: &[&str]) -> Result<(), String> {
    let session = || Session::open().map_err(|e| e.to_string());
    match args {
        ["status"] => {
            status(&session()?);
            Ok(())
        }
        ["config"] => {
            println!("{:#?}", session()?.config());
            Ok(())
        }
        ["xid", gpu, code] => {
            let s = session()?;
            let code = code.parse().map_err(|_| format!("XID {code:?}: expected a number"))?;
            s.inject_xid(gpu_index(&s, gpu)?, code);
            Ok(())
        }
        ["lose", gpu] => {
            let s = session()?;
            s.set_lost(gpu_index(&s, gpu)?, true);
            Ok(())
        }
        ["restore", gpu] => {
            let s = session()?;
            s.set_lost(gpu_index(&s, gpu)?, false);
            Ok(())
        }
        _ => Err(USAGE.into()),
    }
}

/// A GPU by index or UUID.
fn gpu_index(session: &Session, text: &str) -> Result<usize, String> {
    let gpus = &session.config().gpus;
    gpus.iter()
        .position(|g| g.uuid_text() == text)
        .or_else(|| text.parse().ok().filter(|&i: &usize| i < gpus.len()))
        .ok_or_else(|| format!("GPU {text:?}: expected 0 to {} or a UUID", gpus.len() - 1))
}

fn status(session: &Session) {
    const MIB: u64 = 1 << 20;
    for (i, gpu) in session.config().gpus.iter().enumerate() {
        let (busy_ns, switches) = session.gpu_busy(i);
        println!(
            "GPU {i} {} {}{}: {} of {} MiB used, busy {:.3} s ({} % of the last second), {switches} switches",
            gpu.name,
            gpu.uuid_text(),
            if session.is_lost(i) { " LOST" } else { "" },
            session.used(i) / MIB,
            gpu.memory_bytes / MIB,
            seconds(busy_ns),
            session.utilisation_percent(i),
        );
        for p in session.processes(i) {
            let kinds: Vec<String> =
                p.by_use.iter().map(|(u, n)| format!("{} {}", n / MIB, u.name())).collect();
            println!(
                "  pid {:<8} {:<16} {:>7} MiB ({}), busy {:.3} s",
                p.pid,
                p.name,
                p.used_bytes / MIB,
                kinds.join(", "),
                seconds(p.busy_ns),
            );
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "for people")]
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}
