//! `simgpu-ctl`: looks at the simulated GPUs, and makes things happen to them.

use simgpu::channel::GpuThread;
use simgpu::faults::{ERRORS, RECOVERY};
use simgpu::{Config, Session};
use std::process::ExitCode;

const USAGE: &str = "\
usage: simgpu-ctl COMMAND

  status              GPUs, processes, memory, GPU time (SIMGPU_STATE names the state)
  account             who ran for how long and did how much, and how long GPUs were idle between two
                      processes: one JSON object for each GPU or MIG instance, a line each
  xid GPU CODE        inject an XID error; a MIG instance's UUID, or GPU:INSTANCE as NVML numbers
                      them, attributes it to that GPU instance
  lose GPU            make a GPU fall off the bus (XID 79)
  restore GPU         bring it back, reset
  ecc GPU COUNT       let it have had so many uncorrectable ECC errors since its last reset
  remap GPU failed|ok a row of its memory cannot be remapped, or all can
  recovery GPU WHAT   what the driver says it takes: none, reset, reboot, drain, drain-and-reset
  reset GPU           reset it: counters start at zero, the driver asks for nothing
  fail GPU FUNCTION ERROR|ok
                      let an NVML function (`all`: each) fail for a GPU, or for its instance as
                      GPU:INSTANCE: unknown, not-supported, lost, timeout, ..., or a number; or work again
  serve               be the GPUs that write words of memory, as long as this runs: says `serving` first
  driver unload|load  take the driver away from NVML, or bring it back
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
        ["account"] => {
            let s = session()?;
            for unit in 0..s.config().units.len() {
                println!("{}", s.account(unit, 0).json());
            }
            Ok(())
        }
        ["config"] => {
            println!("{:#?}", session()?.config());
            Ok(())
        }
        ["xid", gpu, code] => {
            let s = session()?;
            let code = code.parse().map_err(|_| format!("XID {code:?}: expected a number"))?;
            match instance(s.config(), gpu) {
                Some((gpu, gpu_instance)) => s.inject_xid(gpu, Some(gpu_instance), code),
                None => s.inject_xid(gpu_index(&s, gpu)?, None, code),
            }
            Ok(())
        }
        [what @ ("lose" | "restore" | "reset"), gpu] => {
            let s = session()?;
            let gpu = gpu_index(&s, gpu)?;
            match *what {
                "reset" => s.reset_gpu(gpu),
                _ => s.set_lost(gpu, *what == "lose"),
            }
            Ok(())
        }
        ["serve"] => {
            let _gpu = GpuThread::start(session()?).map_err(|e| e.to_string())?;
            println!("serving");
            loop {
                std::thread::park();
            }
        }
        ["driver", what @ ("unload" | "load")] => {
            session()?.set_driver_loaded(*what == "load");
            Ok(())
        }
        ["fail", gpu, function, error] => fail(&session()?, gpu, function, error),
        [what @ ("ecc" | "remap" | "recovery"), gpu, value] => fault(&session()?, what, gpu, value),
        _ => Err(USAGE.into()),
    }
}

/// A MIG instance by UUID or GPU:INSTANCE: its GPU's index and its GPU instance's id.
fn instance(config: &Config, text: &str) -> Option<(usize, u32)> {
    (0..config.units.len()).find_map(|at| {
        let (unit, mig) = (&config.units[at], config.instance(at)?);
        let uuid = mig.uuid_text(&config.gpus[unit.gpu], &config.driver_version);
        let number = format!("{}:{}", unit.gpu, unit.instance?);
        (text == uuid || text == number).then_some((unit.gpu, mig.gpu_instance))
    })
}

fn fault(session: &Session, what: &str, gpu: &str, value: &str) -> Result<(), String> {
    let gpu = gpu_index(session, gpu)?;
    let mut faults = session.faults(gpu);
    match (what, value) {
        ("remap", "failed") => faults.remap_failed = true,
        ("remap", "ok") => faults.remap_failed = false,
        ("ecc", count) => {
            faults.uncorrectable =
                count.parse().map_err(|_| format!("{count:?}: expected a number"))?;
        }
        ("recovery", word) => {
            let number = RECOVERY.iter().position(|known| *known == word);
            let number =
                number.ok_or_else(|| format!("{word:?}: expected {}", RECOVERY.join(", ")))?;
            faults.recovery = u32::try_from(number).unwrap_or(0);
        }
        _ => return Err(USAGE.into()),
    }
    session.set_faults(gpu, faults);
    Ok(())
}

fn fail(session: &Session, gpu: &str, function: &str, error: &str) -> Result<(), String> {
    let known = ERRORS.iter().find(|(word, _)| *word == error).map(|(_, code)| *code);
    let code = match error {
        "ok" => Some(0),
        _ => known.or_else(|| error.parse().ok()),
    };
    let code = code.ok_or_else(|| {
        let words: Vec<&str> = ERRORS.iter().map(|(word, _)| *word).collect();
        format!("{error:?}: expected ok, a number, {}", words.join(", "))
    })?;
    let (gpu, instance) = match gpu.split_once(':') {
        Some((gpu, number)) => {
            let number = number.parse().map_err(|_| format!("{number:?}: expected a number"))?;
            (gpu, Some(number))
        }
        None => (gpu, None),
    };
    match session.set_failing(gpu_index(session, gpu)?, instance, function, code) {
        true => Ok(()),
        false => Err(format!("GPU {gpu}: too many functions fail already")),
    }
}

fn gpu_index(session: &Session, text: &str) -> Result<usize, String> {
    let gpus = &session.config().gpus;
    gpus.iter()
        .position(|g| g.uuid_text() == text)
        .or_else(|| text.parse().ok().filter(|&i: &usize| i < gpus.len()))
        .ok_or_else(|| format!("GPU {text:?}: expected 0 to {} or a UUID", gpus.len() - 1))
}

fn status(session: &Session) {
    let config = session.config();
    for (i, gpu) in config.gpus.iter().enumerate() {
        let lost = if session.is_lost(i) { " LOST" } else { "" };
        if gpu.mig.is_some() {
            println!("GPU {i} {} {}{lost}: MIG mode", gpu.name, gpu.uuid_text());
        } else {
            usage(session, config.units_of(i).start, &format!("GPU {i} {}", gpu.name), lost);
        }
        for (n, mig) in gpu.mig.iter().flatten().enumerate() {
            let label = format!("GPU {i}:{n} {}", mig.name(gpu));
            usage(session, config.units_of(i).start + n, &label, lost);
        }
    }
}

fn usage(session: &Session, unit: usize, label: &str, lost: &str) {
    const MIB: u64 = 1 << 20;
    let config = session.config();
    let gpu = &config.gpus[config.units[unit].gpu];
    let uuid = match config.instance(unit) {
        Some(mig) => mig.uuid_text(gpu, &config.driver_version),
        None => gpu.uuid_text(),
    };
    let (busy_ns, switches) = session.gpu_busy(unit);
    println!(
        "{label} {uuid}{lost}: {} of {} MiB used, busy {:.3} s ({} % of the last second), {switches} switches",
        session.used(unit) / MIB,
        config.memory_of(unit).0 / MIB,
        seconds(busy_ns),
        session.utilisation_percent(unit),
    );
    for p in session.processes(unit) {
        let (mib, busy) = (p.used_bytes / MIB, seconds(p.busy_ns));
        println!("  pid {:<8} {:<16} {mib:>7} MiB, busy {busy:.3} s", p.pid, p.name);
    }
}

#[allow(clippy::cast_precision_loss, reason = "for people")]
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}
