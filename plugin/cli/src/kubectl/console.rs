//! `tessera console`: the page for all nodes, from a workstation or as a Deployment.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use tessera_cluster::{Access, Client};
use tessera_fleet::Live;
use tessera_web::{Authorisation, Options, Server, Tls};

use super::Common;
use crate::source::Failure;

/// How often nodes are asked, and the page is.
const EVERY: Duration = Duration::from_secs(2);
/// For one question to the API server about rights.
const LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where to serve it; :PORT is every address, of IPv6 and of IPv4
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9482")]
    listen: Listen,
    /// Readers' rights: all that reach a loopback address see what you do; elsewhere a token's rights on pods decide
    #[arg(long, value_enum, default_value = "auto")]
    authorisation: Who,
    /// PEM file of the certificate; without one, the console makes its own where it does not listen on loopback
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// PEM file of its key
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Speak plain HTTP, behind an ingress that protects tokens on their way
    #[arg(long, conflicts_with = "tls_cert")]
    plain: bool,
}

/// Addresses, of which the first that the kernel takes is served.
#[derive(Clone, Debug)]
struct Listen(Vec<SocketAddr>);

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match tessera_config::addresses(text) {
            Ok(all) if !all.is_empty() => Ok(Listen(all)),
            _ => Err("no address and port; write 127.0.0.1:9482, [::1]:9482, or :9482 for every \
                      address"
                .to_owned()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Who {
    /// `none` on a loopback address, else `kubernetes`
    Auto,
    /// Everybody that can connect, on a loopback address alone
    None,
    /// Users of the API server, by their rights
    Kubernetes,
}

/// What protects the console; an error where nothing would.
fn protection(args: &Args) -> Result<(bool, Tls), Failure> {
    let local = args.listen.0.iter().all(|address| address.ip().is_loopback());
    let reviews = match args.authorisation {
        Who::Kubernetes => true,
        Who::Auto => !local,
        Who::None if local => false,
        Who::None => {
            return Err(Failure::usage(format!(
                "everybody that reaches port {} could see everything: listen on 127.0.0.1, or use --authorisation \
                 kubernetes",
                args.listen.0[0].port()
            )));
        }
    };
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(certificate), Some(key)) => {
            Tls::Files { certificate: certificate.clone(), key: key.clone() }
        }
        _ if local || args.plain => Tls::Plain,
        _ => Tls::SelfSigned,
    };
    Ok((reviews, tls))
}

/// Serves it until it is asked to end.
pub(crate) fn main(args: &Args, common: &Common) -> Result<ExitCode, Failure> {
    let (reviews, tls) = protection(args)?;
    let fleet = common.fleet()?;
    let authorisation = match reviews {
        false => Authorisation::None,
        true => {
            let access = Access::of_user(common.kubeconfig.as_deref(), common.context.as_deref());
            let access = access.map_err(Failure::usage)?;
            Authorisation::kubernetes(Client::new(access, LIMIT), Arc::default())
        }
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let done = runtime.block_on(async {
        use tokio::signal::unix::{SignalKind, signal};
        let (mut end, mut stop) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let mut options = Options::new(Arc::new(Live::new(fleet, EVERY)));
        options.listen.clone_from(&args.listen.0);
        let scheme = if tls == Tls::Plain { "http" } else { "https" };
        (options.tls, options.authorisation, options.interval) = (tls, authorisation, EVERY);
        options.report = Arc::new(|_, problem| {
            if let Some(problem) = problem {
                eprintln!("{}", tessera_model::printable::line(&problem));
            }
        });
        let server = Server::start(options)?;
        let announced = async {
            if let Some(address) = server.bound().await {
                eprintln!("the console is at {scheme}://{address}/; Ctrl-C ends it");
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = announced => {}
            _ = end.recv() => {}
            _ = stop.recv() => {}
        }
        Ok(ExitCode::SUCCESS)
    });
    runtime.shutdown_background();
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Console {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn nothing_is_open_without_rights_and_no_token_travels_in_the_clear() {
        let of = |words: &str| {
            let words = ["console"].into_iter().chain(words.split_whitespace());
            protection(&Console::try_parse_from(words).unwrap().args)
                .map_err(|failure| failure.status)
        };
        assert_eq!(of(""), Ok((false, Tls::Plain)));
        assert_eq!(of("--listen 0.0.0.0:9482"), Ok((true, Tls::SelfSigned)));
        assert_eq!(of("--listen [::]:9482 --plain"), Ok((true, Tls::Plain)));
        assert_eq!(of("--listen :9482"), Ok((true, Tls::SelfSigned)));
        assert_eq!(of("--listen 0.0.0.0:9482 --authorisation none"), Err(64));
        assert_eq!(of("--listen :9482 --authorisation none"), Err(64));
        assert_eq!(of("--authorisation kubernetes"), Ok((true, Tls::Plain)));
        let files = Tls::Files { certificate: "/c".into(), key: "/k".into() };
        assert_eq!(of("--listen 0.0.0.0:1 --tls-cert /c --tls-key /k"), Ok((true, files)));
        assert!(Console::try_parse_from(["console", "--tls-cert", "/c"]).is_err());
    }
}
