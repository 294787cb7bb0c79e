//! `tessera config`.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;
use tessera_agent::reload::plan::problems;
use tessera_api::print::{Page, Paper, Tone, table};
use tessera_config::{Config, ConfigError, ConfigFile, Judged, keys};
use tessera_gpu::nvml::NvmlDiscovery;
use tessera_gpu::{Discovery, DiscoveryError};
use tessera_model::gpu::Gpu;
use tessera_model::percent::format_cores;
use tessera_model::printable;
use tessera_model::quantity::format_bytes;
use tessera_rules::{capacity, shares};
use tessera_system::{files, terminal};
use tessera_tenant::delivery::driver::nvml as nvml_library;
use tessera_view::API_VERSION;
use tessera_view::change::{
    AllocationChange, ConfigurationChange, ConfigurationProblem, PlanRequest, PlanResponse,
    ReloadRequest, ReloadResponse, ShareChange, ShareView,
};

use super::EXIT_USAGE;
use crate::output::{Format, show};
use crate::source::{Failure, change};
use crate::wait;

#[derive(Debug, Subcommand)]
pub(super) enum ConfigCommand {
    /// List every wrong value of a configuration, or else every contradiction, also with this machine's GPUs
    ///
    /// Exits 0 if it could be put in force, 1 if it could and would leave none of this machine's GPUs to
    /// sell, 64 if not.
    #[command(after_help = "Examples:\n  tessera config check new.toml\n  \
                            kubectl create cm tessera --from-file=config.toml --dry-run=client -o json | \
                            jq -r '.data[\"config.toml\"]' | tessera config check -")]
    Check {
        /// The file, or "-" for standard input [default: --config]
        file: Option<PathBuf>,
    },
    /// Show what a configuration would change, for the node and each running allocation
    ///
    /// Asks the running plugin, and changes nothing. Exits 0, 64 for a configuration that would be refused, or 69
    /// if the plugin does not answer.
    Plan {
        /// The file, or "-" for standard input
        file: PathBuf,
        /// Output format
        #[arg(long, short, value_enum, default_value = "text")]
        output: Format,
    },
    /// Have the running plugin read its file again, and show the outcome
    ///
    /// It does so by itself when the file changes, and on SIGHUP. Exits 0 if the file is in force, 64 if it
    /// was refused and the configuration before stays, 69 if the plugin does not answer.
    Reload {
        /// Output format
        #[arg(long, short, value_enum, default_value = "text")]
        output: Format,
    },
    /// Print the commented defaults
    Default,
    /// Print the reference of all keys, as Markdown
    Reference,
    /// Print what a file may say, as JSON Schema (draft 7)
    Schema,
}

pub(super) fn main(command: ConfigCommand, file: ConfigFile) -> anyhow::Result<ExitCode> {
    match command {
        ConfigCommand::Check { file: other } => check(&match other {
            Some(path) => read(&path)?,
            None => file.judge(),
        }),
        ConfigCommand::Plan { file: path, output } => {
            Ok(plan(&file.for_asking()?, &read(&path)?, &path, output)?)
        }
        ConfigCommand::Reload { output } => Ok(reload(&file.for_asking()?, output)?),
        ConfigCommand::Default => print(keys::COMMENTED),
        ConfigCommand::Reference => print(keys::REFERENCE),
        ConfigCommand::Schema => print(&format!("{:#}\n", keys::schema())),
    }
}

fn print(text: &str) -> anyhow::Result<ExitCode> {
    terminal::print(text)?;
    Ok(ExitCode::SUCCESS)
}

/// A file, or standard input.
fn read(path: &Path) -> anyhow::Result<Judged> {
    if path == Path::new("-") {
        let name = Path::new("(standard input)");
        // As long as it takes: somebody may be typing.
        let bytes = files::read_from(std::io::stdin().lock(), files::CONFIGURATION);
        return Ok(match bytes.and_then(files::utf8) {
            Ok(text) => Judged::of(text, name),
            Err(error) => Judged::unread(name, &error),
        });
    }
    let judged = ConfigFile { asked: Some(path.to_owned()) }.judge();
    match judged.error() {
        Some(error) if error.is_forbidden() => Err(error.into()),
        _ => Ok(judged),
    }
}

fn check(judged: &Judged) -> anyhow::Result<ExitCode> {
    let config = &judged.config;
    if let Some(error) = judged.error() {
        return Err(error.into());
    }
    let discovery = NvmlDiscovery::new(nvml_library(config));
    let gpus = discovery.gpus(&config.gpus);
    let problems = capacity::check(gpus.as_deref().unwrap_or_default(), config);
    if !problems.is_empty() {
        return Err(ConfigError { file: config.source.file.clone(), problems }.into());
    }
    match gpus {
        Ok(gpus) => {
            let silent = discovery.silent().into_iter().map(|gpu| gpu.to_string());
            let notes = capacity::remarks(&gpus, config);
            for text in discovery.unsold().into_iter().chain(silent).chain(notes) {
                eprintln!("note: {}", printable::line(&text));
            }
            print(&format!("{}ok\n", offers(&gpus, config)))
        }
        // Sound, and on this machine of no use: a mistyped name, or another node's file.
        Err(error) if error.has_gpus() => {
            let error = error.to_string();
            eprintln!("warning: nothing would be sold here: {}", printable::line(&error));
            for text in discovery.unsold() {
                eprintln!("note: {}", printable::line(&text));
            }
            Ok(ExitCode::FAILURE)
        }
        // The driver answers, and of no GPU does it tell what it takes to sell it.
        Err(error @ DiscoveryError::Unsellable(_)) => {
            let error = error.to_string();
            eprintln!("warning: nothing would be sold here: {}", printable::line(&error));
            Ok(ExitCode::FAILURE)
        }
        Err(error) => print(&format!("ok, as far as can be checked without GPUs ({error})\n")),
    }
}

/// What each GPU would be sold as.
fn offers(gpus: &[Gpu], config: &Config) -> String {
    let header = ["GPU", "NAME", "UUID", "RESOURCE", "REPLICAS", "MEMORY", "CORES"];
    let rows = gpus.iter().flat_map(|gpu| {
        shares::cut(gpu, config).into_iter().enumerate().map(|(i, share)| {
            // What belongs to the GPU stands in its first row.
            let once = |text: String| if i == 0 { text } else { String::new() };
            vec![
                once(gpu.index.to_string()),
                once(gpu.name.clone()),
                once(gpu.uuid.clone()),
                share.resource,
                share.count.to_string(),
                format_bytes(share.memory_bytes),
                format!("{} {}", format_cores(share.cores_millis), share.compute.into_str()),
            ]
        })
    });
    let mut out = String::new();
    table(&mut out, &header, rows.collect());
    out
}

fn plan(known: &Config, judged: &Judged, path: &Path, output: Format) -> Result<ExitCode, Failure> {
    let name = judged.config.source.file.as_deref().unwrap_or(path).display().to_string();
    let request = PlanRequest { text: judged.text.clone(), file: name.clone() };
    let response = match judged.is_unread() {
        true => PlanResponse { problems: problems(&judged.problems), ..PlanResponse::default() },
        false => wait(change(known, &request))?,
    };
    let response =
        PlanResponse { api_version: API_VERSION.to_owned(), file: name.clone(), ..response };
    show(&response, output, |_| plan_text(&response, &name))?;
    Ok(refusal(&response.problems))
}

fn reload(known: &Config, output: Format) -> Result<ExitCode, Failure> {
    let response = wait(change(known, &ReloadRequest {}))?;
    show(&response, output, |_| reload_text(&response))?;
    Ok(refusal(&response.problems))
}

fn refusal(problems: &[ConfigurationProblem]) -> ExitCode {
    if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_USAGE) }
}

fn problem_lines(problems: &[ConfigurationProblem], file: &str) -> String {
    let mut out = String::new();
    for ConfigurationProblem { key, line, message } in problems {
        let (key, message) = (printable::line(key), printable::line(message));
        // Writing to a string does not fail.
        let _ = match (line, &*key) {
            (0, "") => writeln!(out, "{file}: {message}"),
            (0, key) => writeln!(out, "{file}: {key}: {message}"),
            (line, "") => writeln!(out, "{file}:{line}: {message}"),
            (line, key) => writeln!(out, "{file}:{line}: {key}: {message}"),
        };
    }
    out
}

fn change_table(out: &mut String, changes: &[ConfigurationChange]) {
    let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "–".to_owned());
    let row = |change: &ConfigurationChange| {
        let (before, after) = (value(&change.before), value(&change.after));
        vec![change.key.clone(), before, after, change.takes_effect.clone()]
    };
    let header = ["KEY", "BEFORE", "AFTER", "TAKES EFFECT"];
    table(out, &header, changes.iter().map(row).collect());
}

/// Keys that the file leaves out, by when their defaults take effect: names alone, because of a part of a file
/// they are most of what there is.
fn absent_text(changes: &[ConfigurationChange]) -> String {
    let mut page = Page::new(Paper::plain());
    page.say(0, Tone::Plain, "NOT IN THE FILE, SO BACK TO THE DEFAULT");
    let mut when: Vec<&str> = changes.iter().map(|change| change.takes_effect.as_str()).collect();
    when.sort_unstable();
    when.dedup();
    for when in when {
        let keys = changes.iter().filter(|change| change.takes_effect == when);
        let keys: Vec<&str> = keys.map(|change| change.key.as_str()).collect();
        page.say(2, Tone::Plain, &format!("{when}: {}", keys.join(", ")));
    }
    page.say(
        2,
        Tone::Plain,
        "A file is taken whole: give all of it, or leave these as they are meant to be.",
    );
    page.finish()
}

/// For people.
pub(super) fn plan_text(plan: &PlanResponse, file: &str) -> String {
    let mut out = String::new();
    if !plan.problems.is_empty() {
        let _ = writeln!(
            out,
            "{}This configuration would be refused, and the one in force stay.",
            problem_lines(&plan.problems, file)
        );
        return out;
    }
    if plan.changes.is_empty() {
        out.push_str("Nothing would change.\n");
    } else {
        let (absent, said): (Vec<_>, Vec<_>) =
            plan.changes.iter().cloned().partition(|change| change.absent);
        if !said.is_empty() {
            out.push_str("CONFIGURATION\n");
            change_table(&mut out, &said);
        }
        if !absent.is_empty() {
            let gap = if said.is_empty() { "" } else { "\n" };
            out.push_str(gap);
            out.push_str(&absent_text(&absent));
        }
    }
    if !plan.shares.is_empty() {
        out.push_str("\nREPLICAS\n");
        let header = ["GPU", "RESOURCE", "REPLICAS", "MEMORY", "CORES", "CHANGE"];
        table(&mut out, &header, plan.shares.iter().map(share_row).collect());
    }
    if !plan.allocations.is_empty() {
        out.push_str("\nRUNNING ALLOCATIONS\n");
        for allocation in &plan.allocations {
            let _ = writeln!(out, "  {}", printable::line(&name(allocation)));
            for effect in &allocation.effects {
                let _ = writeln!(out, "    {}", printable::line(effect));
            }
        }
    }
    if !plan.notes.is_empty() {
        out.push_str("\nNOTES\n");
        let mut page = Page::new(Paper::plain());
        plan.notes.iter().for_each(|note| page.say(2, Tone::Plain, note));
        out.push_str(&page.finish());
    }
    out
}

fn name(allocation: &AllocationChange) -> String {
    let id = &allocation.id;
    let resource = match allocation.resource_name.as_str() {
        "" => String::new(),
        resource => format!(", {resource}"),
    };
    match &allocation.holder {
        Some(holder) => format!("{holder}{resource}"),
        None => format!("allocation {id}{resource}"),
    }
}

fn share_row(change: &ShareChange) -> Vec<String> {
    let both = |show: &dyn Fn(&ShareView) -> String| {
        let (before, after) = (change.before.as_ref().map(show), change.after.as_ref().map(show));
        match (before, after) {
            (Some(before), Some(after)) if before == after => after,
            (before, after) => {
                let text = |text: Option<String>| text.unwrap_or_else(|| "–".to_owned());
                format!("{} → {}", text(before), text(after))
            }
        }
    };
    let mut words = Vec::new();
    let mut say = |count: u32, text: &str| {
        if count > 0 {
            words.push(format!("{count} {text}"));
        }
    };
    say(change.appear, "appear");
    say(change.retire, "retire");
    say(change.retire_held, "of them listed Unhealthy until their pods end");
    say(change.no_room, "Unhealthy until there is room beside what runs");
    let index = change.gpu_index.map(|index| index.to_string());
    vec![
        index.unwrap_or_else(|| change.gpu_uuid.clone()),
        change.resource_name.clone(),
        both(&|view| view.replicas.to_string()),
        both(&|view| format_bytes(view.memory_bytes)),
        both(&|view| format!("{} {}", format_cores(view.cores_millis), view.policy.into_str())),
        words.join(", "),
    ]
}

/// For people.
pub(super) fn reload_text(answer: &ReloadResponse) -> String {
    if !answer.problems.is_empty() {
        return format!(
            "{}Refused; the last good configuration stays in force.\n",
            problem_lines(&answer.problems, &answer.file)
        );
    }
    let mut out = String::new();
    if answer.changes.is_empty() {
        out.push_str("In force; nothing has changed.\n");
    } else {
        out.push_str("IN FORCE\n");
        change_table(&mut out, &answer.changes);
    }
    if !answer.waiting.is_empty() {
        out.push_str("\nWAITING FOR A RESTART OF THE PLUGIN\n");
        change_table(&mut out, &answer.waiting);
    }
    out
}
