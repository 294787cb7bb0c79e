//! Completions of the shell: pods of the sandbox that runs.

use clap::Command;
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};

use super::control;

/// Commands whose word without an option is a pod that there is.
const TAKE_A_POD: [&str; 6] = ["rm", "logs", "wait", "start", "restart", "kill"];

/// `tessera sandbox`, whose arguments know the pods that they take.
pub fn with_names(sandbox: Command) -> Command {
    sandbox.mut_subcommands(|command| {
        if !TAKE_A_POD.contains(&command.get_name()) {
            return command;
        }
        command.mut_args(|arg| match arg.is_positional() {
            true => arg.add(ArgValueCandidates::new(pods)),
            false => arg,
        })
    })
}

fn pods() -> Vec<CompletionCandidate> {
    control::pods().into_iter().map(CompletionCandidate::new).collect()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(subcommand)]
        _command: crate::command::Command,
    }

    #[test]
    fn every_command_that_takes_a_pod_knows_pods() {
        let line = with_names(Line::command());
        for name in TAKE_A_POD {
            let command = line.find_subcommand(name).unwrap_or_else(|| panic!("no {name}"));
            let mut words = command.get_positionals();
            assert!(words.all(|arg| arg.get::<ArgValueCandidates>().is_some()), "{name}");
        }
        let run = line.find_subcommand("run").unwrap();
        assert!(run.get_positionals().all(|arg| arg.get::<ArgValueCandidates>().is_none()));
    }
}
