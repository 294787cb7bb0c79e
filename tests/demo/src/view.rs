//! The live view: one picture of everything, drawn again four times a second on a terminal, or a
//! line per second into a log. Rendering is pure; [`Screen`] owns the terminal.

use std::io::{self, IsTerminal};

use tessera_model::quantity::format_bytes;
use tessera_system::terminal::{self, Look};

use super::table::{bar, count, fit, millis};

/// What is shown.
#[derive(Clone, Debug, Default)]
pub(super) struct Scene {
    /// What runs on what.
    pub title: String,
    /// How it is wired.
    pub subtitle: String,
    /// Seconds since the start.
    pub elapsed: f64,
    /// Seconds in all.
    pub total: f64,
    /// One per GPU.
    pub gpus: Vec<GpuLine>,
    /// One per tenant.
    pub tenants: Vec<TenantLine>,
    /// What happened, oldest first: second and text.
    pub events: Vec<(f64, String)>,
}

/// A GPU as the driver accounts for it.
#[derive(Clone, Debug, Default)]
pub(super) struct GpuLine {
    /// Index and name.
    pub name: String,
    /// Bytes in use.
    pub used: u64,
    /// Bytes in all.
    pub memory: u64,
    /// Replicas given away.
    pub taken: usize,
    /// Replicas in all.
    pub replicas: usize,
}

/// A tenant as the driver, and it itself, account for it.
#[derive(Clone, Debug, Default)]
pub(super) struct TenantLine {
    /// Name.
    pub name: String,
    /// GPU index, where it is placed.
    pub gpu: Option<usize>,
    /// Bytes it may hold.
    pub quota: u64,
    /// Bytes the driver shows for it.
    pub used: u64,
    /// Requests refused.
    pub refused: u64,
    /// Requests in the last second, median and 99th percentile in microseconds.
    pub latency: Option<(u64, u64, u64)>,
    /// What it does now.
    pub state: String,
    /// Its part of the GPU's time, where that is what is shown.
    pub time: Option<TimeLine>,
}

/// A tenant's part of a GPU's time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TimeLine {
    /// Percent that its quota page gives it.
    pub asked: Option<u32>,
    /// Percent of the last second, by the driver's account.
    pub got: u32,
    /// Whether its gate is open now.
    pub holds: bool,
}

const BOLD: &str = "1";
const DIM: &str = "2";
const RED: &str = "31";
const GREEN: &str = "32";
const YELLOW: &str = "33";
const CYAN: &str = "36";

/// What the picture draws on a terminal of this kind.
trait Draw {
    /// The text in a colour or style, where the terminal has any.
    fn paint(self, style: &str, text: &str) -> String;
    /// A bar of `width` characters, filled as far as `part` is of `whole`.
    fn bar(self, part: u64, whole: u64, width: usize) -> String;
}

impl Draw for Look {
    fn paint(self, style: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{style}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn bar(self, part: u64, whole: u64, width: usize) -> String {
        let bar = bar(part, whole, width);
        if self.unicode {
            return bar;
        }
        bar.chars().map(|c| if c == '·' { '.' } else { '#' }).collect()
    }
}

/// The picture: at most `height` lines of at most `width` visible characters.
pub(super) fn frame(scene: &Scene, look: Look, width: usize, height: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let clock = format!("{:.1} of {:.1} s", scene.elapsed, scene.total);
    let room = width.saturating_sub(clock.len() + 1);
    let title = fit(&scene.title, room);
    lines.push(format!(
        "{}{}",
        look.paint(BOLD, &format!("{title:<room$} ")),
        look.paint(DIM, &fit(&clock, width))
    ));
    lines.push(look.paint(DIM, &fit(&scene.subtitle, width)));
    lines.push(String::new());
    for gpu in &scene.gpus {
        lines.push(gpu_line(gpu, look, width));
    }
    lines.push(String::new());
    // With room for it, each tenant says what it does on a line of its own.
    let spare = height.saturating_sub(lines.len() + 1 + scene.tenants.len() + 1);
    let spoken = spare >= scene.tenants.len() + 3;
    let timed = scene.tenants.iter().any(|t| t.time.is_some());
    let cells = if timed { time_cells } else { tenant_cells };
    lines.push(look.paint(DIM, &cells(None, look, width).plain()));
    for tenant in &scene.tenants {
        lines.push(cells(Some(tenant), look, width).painted(look));
        if spoken {
            lines.push(look.paint(DIM, &fit(&format!("         {}", tenant.state), width)));
        }
    }
    lines.push(String::new());
    let room = height.saturating_sub(lines.len());
    let first = scene.events.len().saturating_sub(room);
    for (at, event) in &scene.events[first..] {
        let stamp = format!("{at:5.1} s  ");
        let text = fit(event, width.saturating_sub(stamp.len()));
        lines.push(format!("{}{text}", look.paint(DIM, &fit(&stamp, width))));
    }
    lines.truncate(height);
    lines
}

fn gpu_line(gpu: &GpuLine, look: Look, width: usize) -> String {
    let left = format!("{:<22} ", fit(&gpu.name, 22));
    let right = format!(
        " {:>8} of {:<8}  {} of {} replicas taken",
        format_bytes(gpu.used),
        format_bytes(gpu.memory),
        gpu.taken,
        gpu.replicas
    );
    let room = width.saturating_sub(left.chars().count() + right.chars().count()).min(40);
    if room < 4 {
        return fit(&format!("{left}{}", right.trim_start()), width);
    }
    format!("{left}{}{right}", look.paint(CYAN, &look.bar(gpu.used, gpu.memory, room)))
}

/// Cells with their style, so that padding and cutting see visible characters only.
struct Cells(Vec<(&'static str, String)>);

impl Cells {
    /// Whole columns go where the terminal is too narrow for all.
    fn fit(columns: impl IntoIterator<Item = (&'static str, String)>, width: usize) -> Self {
        let mut used = 0;
        let kept = columns.into_iter().take_while(|(_, text)| {
            used += text.chars().count();
            used <= width
        });
        Self(kept.collect())
    }

    fn plain(&self) -> String {
        self.0.iter().map(|(_, text)| text.as_str()).collect::<String>().trim_end().to_owned()
    }

    fn painted(&self, look: Look) -> String {
        let paint = |(style, text): &(&str, String)| {
            if style.is_empty() { text.clone() } else { look.paint(style, text) }
        };
        self.0.iter().map(paint).collect()
    }
}

/// A tenant's line; the headings for `None`.
fn tenant_cells(tenant: Option<&TenantLine>, look: Look, width: usize) -> Cells {
    let bar_width = width.saturating_sub(75).clamp(0, 30) + 8;
    let cell = |heading: &str, f: &dyn Fn(&TenantLine) -> String| {
        tenant.map_or_else(|| heading.to_owned(), f)
    };
    let latency = |f: fn((u64, u64, u64)) -> u64| {
        move |t: &TenantLine| t.latency.map_or_else(|| "-".to_owned(), |l| millis(f(l)))
    };
    let full = tenant.is_some_and(|t| t.used.saturating_mul(100) >= t.quota.saturating_mul(97));
    let columns: [(&'static str, String); 7] = [
        (BOLD, format!("{:<8} ", fit(&cell("TENANT", &|t| t.name.clone()), 8))),
        (
            "",
            format!(
                "{:<4} ",
                cell("GPU", &|t| t.gpu.map_or_else(|| "-".into(), |gpu| gpu.to_string()))
            ),
        ),
        ("", format!("{:>9}  ", cell("QUOTA", &|t| format_bytes(t.quota)))),
        (
            if full { YELLOW } else { GREEN },
            format!("{:<bar_width$} ", cell("IN USE", &|t| look.bar(t.used, t.quota, bar_width))),
        ),
        ("", format!("{:>9}  ", cell("", &|t| format_bytes(t.used)))),
        (
            if tenant.is_some_and(|t| t.refused > 0) { RED } else { "" },
            format!("{:>8}  ", cell("REFUSED", &|t| count(t.refused))),
        ),
        (
            "",
            format!("{:>9} {:>9}", cell("p50", &latency(|l| l.1)), cell("p99", &latency(|l| l.2))),
        ),
    ];
    Cells::fit(columns, width)
}

/// The same where GPU time is divided: who holds the GPU, share asked and got, latency.
fn time_cells(tenant: Option<&TenantLine>, look: Look, width: usize) -> Cells {
    let bar_width = width.saturating_sub(70).clamp(0, 30) + 8;
    let time = |t: &TenantLine| t.time.unwrap_or_default();
    let cell = |heading: &str, f: &dyn Fn(&TenantLine) -> String| {
        tenant.map_or_else(|| heading.to_owned(), f)
    };
    let percent = |percent: Option<u32>| percent.map_or_else(|| "-".into(), |p| format!("{p} %"));
    let latency = |f: fn((u64, u64, u64)) -> u64| {
        move |t: &TenantLine| t.latency.map_or_else(|| "-".to_owned(), |l| millis(f(l)))
    };
    let holds = |t: &TenantLine| if time(t).holds { "holds" } else { "" }.to_owned();
    let columns = [
        (BOLD, format!("{:<8} ", fit(&cell("TENANT", &|t| t.name.clone()), 8))),
        (CYAN, format!("{:<6} ", cell("GPU", &holds))),
        ("", format!("{:>6}  ", cell("ASKED", &|t| percent(time(t).asked)))),
        (
            GREEN,
            format!(
                "{:<bar_width$} ",
                cell("GOT", &|t| look.bar(time(t).got.into(), 100, bar_width))
            ),
        ),
        ("", format!("{:>6}  ", cell("", &|t| percent(Some(time(t).got))))),
        (
            "",
            format!("{:>9} {:>9}", cell("p50", &latency(|l| l.1)), cell("p99", &latency(|l| l.2))),
        ),
    ];
    Cells::fit(columns, width)
}

/// One line for a log.
pub(super) fn log_line(scene: &Scene) -> String {
    let tenants: Vec<String> = scene
        .tenants
        .iter()
        .filter(|t| t.gpu.is_some())
        .map(|t| {
            let mut text = match t.time {
                Some(TimeLine { asked: Some(asked), got, .. }) => {
                    format!("{} asked {asked} %, got {got} %", t.name)
                }
                Some(TimeLine { got, .. }) => format!("{} got {got} %", t.name),
                None => format!("{} {}/{}", t.name, format_bytes(t.used), format_bytes(t.quota)),
            };
            if t.refused > 0 {
                text += &format!(" refused {}", count(t.refused));
            }
            if let Some((requests, _, p99)) = t.latency {
                text += &format!(" {requests}/s p99 {}", millis(p99));
            }
            text
        })
        .collect();
    format!("{:5.1} s  {}", scene.elapsed, tenants.join(" | "))
}

/// The terminal, or a log where there is none.
pub(super) struct Screen {
    live: bool,
    look: Look,
    logged: usize,
    last_log: f64,
}

impl Screen {
    /// Live where standard output is a terminal that can be drawn on.
    pub fn open(plain: bool) -> Self {
        let dumb = std::env::var("TERM").is_ok_and(|term| term == "dumb");
        let live = !plain && io::stdout().is_terminal() && !dumb;
        if live {
            // Whatever ends the demo, the terminal is given back.
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                restore();
                before(info);
            }));
            // Alternate screen, no cursor (xterm control sequences, DECSET 1049 and 25).
            emit("\x1b[?1049h\x1b[?25l");
        }
        Self { live, look: Look::from_env(), logged: 0, last_log: -1.0 }
    }

    /// How wide reports may be.
    pub fn width() -> usize {
        if !io::stdout().is_terminal() {
            return 120;
        }
        size().0
    }

    /// Draws the scene, or logs what is new in it.
    pub fn show(&mut self, scene: &Scene) {
        if self.live {
            let (width, height) = size();
            // The last column stays empty: some terminals wrap at it.
            let lines = frame(scene, self.look, width.saturating_sub(1), height);
            let mut text = String::from("\x1b[H");
            for (i, line) in lines.iter().enumerate() {
                if i > 0 {
                    text.push_str("\r\n");
                }
                text.push_str(line);
                text.push_str("\x1b[K");
            }
            text.push_str("\x1b[J");
            emit(&text);
            return;
        }
        for (at, event) in &scene.events[self.logged..] {
            emit(&format!("{at:5.1} s  {event}\n"));
        }
        self.logged = scene.events.len();
        if scene.elapsed - self.last_log >= 1.0 && scene.tenants.iter().any(|t| t.gpu.is_some()) {
            self.last_log = scene.elapsed;
            emit(&format!("{}\n", log_line(scene)));
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if self.live {
            restore();
            if !std::thread::panicking() {
                let _ = std::panic::take_hook();
            }
        }
    }
}

fn restore() {
    emit("\x1b[?25h\x1b[?1049l");
}

fn emit(text: &str) {
    // A full disk must not end the demo before it has cleaned up.
    let _ = terminal::print(text);
}

fn size() -> (usize, usize) {
    let (width, height) = terminal::size().unwrap_or((80, 24));
    (width.into(), height.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scene() -> Scene {
        let tenant = |name: &str, used: u64, refused| TenantLine {
            name: name.into(),
            gpu: Some(0),
            quota: 4 << 30,
            used,
            refused,
            latency: (refused == 0).then_some((100, 1850, 2500)),
            state: "serves 100 requests a second".into(),
            time: None,
        };
        Scene {
            title: "Tessera: four tenants on two simulated GPUs".into(),
            subtitle: "kubelet: stand-in over gRPC".into(),
            elapsed: 4.2,
            total: 10.0,
            gpus: vec![GpuLine {
                name: "GPU 0 Simulated".into(),
                used: 7 << 30,
                memory: 16 << 30,
                taken: 3,
                replicas: 4,
            }],
            tenants: vec![tenant("chat", 700 << 20, 0), tenant("greedy", 4 << 30, 2310)],
            events: (0..30).map(|i| (f64::from(i), format!("event {i}"))).collect(),
        }
    }

    /// The same two, and what they get of the GPU's time.
    fn timed() -> Scene {
        let mut scene = scene();
        for (tenant, (asked, got)) in scene.tenants.iter_mut().zip([(75, 74), (25, 26)]) {
            tenant.time = Some(TimeLine { asked: Some(asked), got, holds: asked > 50 });
        }
        scene
    }

    #[test]
    fn the_division_says_who_holds_and_what_was_asked_and_got() {
        let lines = frame(&timed(), Look { colour: false, unicode: true }, 100, 24);
        let chat = lines.iter().find(|l| l.starts_with("chat")).unwrap();
        assert!(chat.contains("holds") && chat.contains("75 %") && chat.contains("74 %"), "{chat}");
        assert!(log_line(&timed()).contains("greedy asked 25 %, got 26 %"));
    }

    fn visible(line: &str) -> usize {
        let mut rest = line;
        let mut seen = 0;
        while let Some(at) = rest.find('\x1b') {
            seen += rest[..at].chars().count();
            rest = rest[at..].split_once('m').map_or("", |(_, after)| after);
        }
        seen + rest.chars().count()
    }

    #[test]
    fn no_frame_is_larger_than_the_terminal() {
        for colour in [true, false] {
            let look = Look { colour, unicode: true };
            for (width, height) in [(20, 5), (40, 10), (79, 24), (80, 24), (120, 40), (200, 60)] {
                for lines in [&scene(), &timed()].map(|s| frame(s, look, width, height)) {
                    assert!(lines.len() <= height, "{} lines in {height}", lines.len());
                    for line in lines {
                        assert!(visible(&line) <= width, "{width}: {line:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_newest_events_are_kept() {
        let lines = frame(&scene(), Look { colour: false, unicode: true }, 100, 24);
        assert!(lines.last().unwrap().contains("event 29"), "{lines:#?}");
        assert!(lines.iter().any(|l| l.contains("2,310")), "{lines:#?}");
        assert!(lines.iter().any(|l| l.contains("serves 100")), "{lines:#?}");
    }

    #[test]
    fn without_unicode_bars_are_ascii() {
        let lines = frame(&scene(), Look { colour: false, unicode: false }, 100, 30);
        assert!(lines.iter().all(|l| l.is_ascii()), "{lines:#?}");
    }

    #[test]
    fn a_log_line_says_who_holds_what() {
        let line = log_line(&scene());
        assert!(line.contains("greedy 4 GiB/4 GiB refused 2,310"), "{line}");
        assert!(line.contains("chat 700 MiB/4 GiB 100/s p99 2.50 ms"), "{line}");
    }
}
