//! The command line of `tessera-pipeline`; see the library.

use std::time::Duration;

use anyhow::{Result, bail};
use tessera_pipeline::client::{self, Load};
use tessera_pipeline::gpu::{Stage, Work};
use tessera_pipeline::server;
use tessera_tenant_program::args::Args;
use tessera_tenant_program::exit::Exit;

const USAGE: &str = "\
tessera-pipeline serve --stage preprocess|model|postprocess [--listen ADDRESS:PORT]
                       [--next http://HOST:PORT] [--kernel-us N] [--resident-mib N]
tessera-pipeline client --target http://HOST:PORT [--requests N] [--rate PER_SECOND]
                       [--max-p99-ms N]

An option that is not given is the environment variable of its name: STAGE, LISTEN, KERNEL_US.";

/// An option, or the variable of its name, or `default`.
fn option<T: std::str::FromStr>(args: &mut Args, name: &str, default: &str) -> Result<T, Exit> {
    let variable = name.trim_start_matches('-').replace('-', "_").to_uppercase();
    let text = match args.value(name)? {
        Some(text) => text,
        None => std::env::var(variable).unwrap_or_else(|_| default.to_owned()),
    };
    text.parse().map_err(|_| Exit::usage(format!("{name}: it cannot be {text:?}\n\n{USAGE}")))
}

async fn run(mut args: Args) -> Result<()> {
    let fail = |exit: Exit| anyhow::anyhow!(exit.message);
    match args.subcommand().as_deref() {
        Some("serve") => {
            let args = &mut args;
            let stage: Stage = option(args, "--stage", "").map_err(fail)?;
            let listen = option(args, "--listen", "0.0.0.0:50051").map_err(fail)?;
            let next: String = option(args, "--next", "").map_err(fail)?;
            let kernel = option(args, "--kernel-us", "500").map_err(fail)?;
            let mib: u32 = option(args, "--resident-mib", "0").map_err(fail)?;
            let kernel = Duration::from_micros(kernel);
            let work = Work { stage, kernel, resident_bytes: u64::from(mib) << 20 };
            server::run(work, listen, Some(next).filter(|uri| !uri.is_empty())).await
        }
        Some("client") => {
            let args = &mut args;
            let target = option(args, "--target", "").map_err(fail)?;
            let requests = option(args, "--requests", "200").map_err(fail)?;
            let rate: f64 = option(args, "--rate", "50").map_err(fail)?;
            let most: u64 = option(args, "--max-p99-ms", "0").map_err(fail)?;
            let max_p99 = (most > 0).then(|| Duration::from_millis(most));
            let rate = rate.clamp(0.1, 10_000.0);
            client::run(&Load { target, requests, rate, max_p99 }).await
        }
        _ => bail!("{USAGE}"),
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    run(Args::from_env()).await
}
