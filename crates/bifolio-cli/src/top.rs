//! `bifolio top`: what a cache in another process does now, from the text that it serves
//! (crate `bifolio-stats`). Each screen is the difference of two snapshots.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::cli::TopOptions;
use crate::output;

/// Columns of a screen.
const WIDTH: usize = 80;
/// Files on a screen.
const FILES: usize = 10;
/// The sample that each device has.
const DEVICE_DIRTY_BYTES: &str = "bifolio_device_dirty_bytes";
/// Time that a process has to answer.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Shows screens until the process ends, or the only one with `--once`.
pub(crate) fn run(options: &TopOptions) -> Result<()> {
    let mut before = find(options.target.as_deref())?;
    let is_terminal = std::io::stdout().is_terminal();
    loop {
        std::thread::sleep(options.interval);
        let after = match Snapshot::of(&before.socket) {
            Ok(after) => after,
            Err(_) if !before.socket.exists() => return Ok(()),
            Err(error) => return Err(error),
        };
        let screen = screen(&before, &after);
        let clear = if is_terminal { "\x1b[H\x1b[2J" } else { "" };
        output::print(&format!("{clear}{screen}"))?;
        if options.once {
            return Ok(());
        }
        before = after;
    }
}

/// The statistics of one cache at one time.
#[derive(Debug)]
struct Snapshot {
    socket: PathBuf,
    at: Instant,
    samples: Vec<Sample>,
    /// Counters of the kernel for each block device, by the label of the device.
    devices: HashMap<String, Transfers>,
}

/// Transfers of a block device since boot.
#[derive(Clone, Copy, Debug, Default)]
struct Transfers {
    reads: f64,
    read_ms: f64,
    writes: f64,
    write_ms: f64,
}

/// One line of the text.
#[derive(Debug, PartialEq)]
struct Sample {
    name: String,
    labels: HashMap<String, String>,
    value: f64,
}

/// Finds the cache of a process, or with a name; the only one if no target is given.
fn find(target: Option<&str>) -> Result<Snapshot> {
    let directories = directories();
    let mut found = Vec::new();
    let mut failures = String::new();
    for directory in &directories {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_none_or(|extension| extension != "sock") {
                continue;
            }
            match Snapshot::of(&path) {
                Ok(snapshot) => found.push(snapshot),
                Err(error) => {
                    let _ = write!(failures, "; {error:#}");
                }
            }
        }
    }
    if let Some(target) = target {
        let path = fs::canonicalize(target).ok();
        let path = path.as_deref().and_then(|path| path.to_str()).unwrap_or(target);
        found.retain(|snapshot| {
            let info = |label| snapshot.label("bifolio_info", label).unwrap_or_default();
            info("pid") == target || info("name") == target || info("name") == path
        });
    }
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => bail!(
            "no cache {}serves its statistics in {} (bifolio_stats::serve; bifolio mount \
             does){failures}",
            target.map_or_else(String::new, |target| format!("of {target} ")),
            directories
                .iter()
                .map(|path| path.display().to_string())
                .collect::<Vec<_>>()
                .join(", ")
        ),
        _ => {
            let mut list = String::new();
            for snapshot in &found {
                let info = |label| snapshot.label("bifolio_info", label).unwrap_or_default();
                let _ = write!(list, " {} ({})", info("pid"), info("name"));
            }
            bail!("several caches serve their statistics, choose one:{list}")
        }
    }
}

/// Returns where sockets are: for root, also those of other users.
fn directories() -> Vec<PathBuf> {
    let own = bifolio_stats::directory();
    let mut directories = vec![own.clone()];
    if own.starts_with("/run/bifolio") {
        let users = fs::read_dir("/run/user").into_iter().flatten().flatten();
        directories.extend(users.map(|user| user.path().join("bifolio")));
    }
    directories
}

impl Snapshot {
    /// Asks the process behind a socket.
    fn of(socket: &std::path::Path) -> Result<Self> {
        let ask = || {
            let mut stream = UnixStream::connect(socket)?;
            stream.set_read_timeout(Some(ANSWER_MAX))?;
            stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            std::io::Result::Ok(text)
        };
        let text = ask().with_context(|| format!("cannot read {}", socket.display()))?;
        let (_, body) = text.split_once("\r\n\r\n").unwrap_or_default();
        let samples: Vec<Sample> = body.lines().filter_map(parse).collect();
        ensure!(!samples.is_empty(), "{} does not serve statistics", socket.display());
        let devices = samples.iter().filter(|sample| sample.name == DEVICE_DIRTY_BYTES);
        let devices = devices.filter_map(|sample| sample.labels.get("device"));
        let devices =
            devices.filter_map(|device| Some((device.clone(), Transfers::of(device)?))).collect();
        Ok(Self { socket: socket.to_owned(), at: Instant::now(), samples, devices })
    }

    fn samples(&self, name: &str) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(move |sample| sample.name == name)
    }

    /// Returns a level, or 0 if the process does not serve it.
    fn level(&self, name: &str) -> f64 {
        self.samples(&format!("bifolio_{name}")).next().map_or(0.0, |sample| sample.value)
    }

    fn count(&self, name: &str) -> f64 {
        self.level(&format!("{name}_total"))
    }

    fn label(&self, name: &str, label: &str) -> Option<&str> {
        self.samples(name).next()?.labels.get(label).map(String::as_str)
    }
}

/// Parses a line; `None` for a comment or another text.
fn parse(line: &str) -> Option<Sample> {
    let (head, value) = line.rsplit_once(' ')?;
    let value = value.parse().ok()?;
    if line.starts_with('#') {
        return None;
    }
    let Some((name, rest)) = head.split_once('{') else {
        return Some(Sample { name: head.to_owned(), labels: HashMap::new(), value });
    };
    let mut labels = HashMap::new();
    let mut rest = rest.strip_suffix('}')?;
    while let Some((label, quoted)) = rest.split_once("=\"") {
        let mut text = String::new();
        let mut letters = quoted.char_indices();
        let end = loop {
            match letters.next()? {
                (at, '"') => break at,
                (_, '\\') => match letters.next()?.1 {
                    'n' => text.push('\n'),
                    other => text.push(other),
                },
                (_, other) => text.push(other),
            }
        };
        labels.insert(label.trim_start_matches(',').to_owned(), text);
        rest = &quoted[end + 1..];
    }
    Some(Sample { name: name.to_owned(), labels, value })
}

/// Describes what happened between two snapshots, in lines of at most [`WIDTH`] columns.
fn screen(before: &Snapshot, after: &Snapshot) -> String {
    let seconds = (after.at - before.at).as_secs_f64().max(1e-3);
    let grown = |name: &str| (after.count(name) - before.count(name)).max(0.0);
    let rate = |name: &str| number(grown(name) / seconds);
    let byte_rate = |name: &str| bytes(grown(name) / seconds);
    let level = |name: &str| bytes(after.level(name));
    let info = |label| after.label("bifolio_info", label).unwrap_or("?");
    let resident = after.samples("process_resident_memory_bytes").next();
    let resident = resident.map_or_else(|| "?".to_owned(), |sample| bytes(sample.value));
    let hits =
        grown("reads_hits_optimistic") + grown("reads_hits_pinned") + grown("reads_hits_slow");
    let lookups = hits + grown("reads_misses");
    let ratio = if lookups > 0.0 { format!("{:.2} %", 100.0 * hits / lookups) } else { "-".into() };
    let throttled_ms = grown("writes_throttle_ns") / 1e6 / seconds;

    let mut lines = vec![
        format!("{}, process {}, over {seconds:.1} s", info("name"), info("pid")),
        format!(
            "memory   resident {resident} of the process, bound {}, used {}",
            level("memory_bound_bytes"),
            level("memory_used_bytes")
        ),
        format!(
            "         dirty {}, free {}, active {}, inactive {}",
            level("memory_dirty_bytes"),
            level("memory_free_bytes"),
            level("memory_active_bytes"),
            level("memory_inactive_bytes")
        ),
        format!(
            "reads    {} pages/s, hit ratio {ratio}, misses {}/s, refaults {}/s",
            number(lookups / seconds),
            rate("reads_misses"),
            rate("evictions_refaults")
        ),
        format!(
            "writes   {}/s accepted, syncs {}/s, throttled {}/s ({throttled_ms:.1} ms/s)",
            byte_rate("writes_bytes"),
            rate("writes_syncs"),
            rate("writes_throttle_waits")
        ),
        format!(
            "storage  read {}/s in {}/s, written {}/s in {}/s, errors {}",
            byte_rate("storage_read_bytes"),
            rate("storage_read_requests"),
            byte_rate("storage_written_bytes"),
            rate("storage_write_requests"),
            number(after.count("storage_write_errors"))
        ),
        format!(
            "reclaim  evicted {}/s folios, stalls {}/s, faults {}/s",
            rate("evictions_folios"),
            rate("memory_reclaim_stalls"),
            rate("maps_faults")
        ),
        stay_line(after, seconds, &grown),
    ];
    for device in after.samples(DEVICE_DIRTY_BYTES) {
        lines.push(device_line(before, after, device));
    }
    lines.extend(file_lines(before, after, seconds));
    let mut text = String::new();
    for line in lines {
        text.extend(line.chars().take(WIDTH));
        text.push('\n');
    }
    text
}

/// Describes how long pages stay.
fn stay_line(after: &Snapshot, seconds: f64, grown: &dyn Fn(&str) -> f64) -> String {
    let early = number(grown("evictions_refaults_early") / seconds);
    let age = age(after, seconds, grown);
    format!("         a page that is not used again stays {age}, early refaults {early}/s")
}

/// Returns the time that a page waits for its eviction (`Stats::eviction_age`).
fn age(after: &Snapshot, seconds: f64, grown: &dyn Fn(&str) -> f64) -> String {
    let leaving = grown("evictions_folios") + grown("evictions_activated_folios");
    if grown("evictions_folios") == 0.0 {
        return "for ever".to_owned();
    }
    let filled = grown("reads_misses") - grown("reads_misses_without_read");
    let folio_bytes = (grown("storage_read_bytes") / filled.max(1.0)).max(4096.0);
    let waiting = after.level("memory_inactive_bytes") / folio_bytes;
    let age = seconds * waiting / leaving;
    match age {
        _ if age >= 7200.0 => format!("{:.0} hours", age / 3600.0),
        _ if age >= 120.0 => format!("{:.0} minutes", age / 60.0),
        _ => format!("{age:.1} s"),
    }
}

/// Describes the files with the most bytes in memory.
fn file_lines(before: &Snapshot, after: &Snapshot, seconds: f64) -> Vec<String> {
    let mut lines = Vec::new();
    let mut files: Vec<&Sample> = after.samples("bifolio_file_resident_bytes").collect();
    files.sort_by(|one, other| other.value.total_cmp(&one.value));
    if !files.is_empty() {
        let heads = ["resident", "dirty", "misses/s", "evicted/s"];
        lines.push(heads.map(|head| format!("{head:>10}")).join(" ") + "  file");
    }
    for file in files.into_iter().take(FILES) {
        let of = |snapshot: &Snapshot, name: &str| {
            let sample = snapshot.samples(name).find(|one| one.labels == file.labels);
            sample.map_or(0.0, |sample| sample.value)
        };
        let rate = |name: &str| number((of(after, name) - of(before, name)).max(0.0) / seconds);
        let columns = [
            bytes(file.value),
            bytes(of(after, "bifolio_file_dirty_bytes")),
            rate("bifolio_file_misses_total"),
            rate("bifolio_file_evicted_folios_total"),
        ];
        let name = end_of(file.labels.get("file").map_or("?", String::as_str), WIDTH - 45);
        lines.push(columns.map(|column| format!("{column:>10}")).join(" ") + "  " + &name);
    }
    lines
}

/// Describes a device: the cache's view, and the latency that the kernel measured meanwhile.
fn device_line(before: &Snapshot, after: &Snapshot, device: &Sample) -> String {
    let of_device = |name: &str| {
        after.samples(name).find(|one| one.labels == device.labels).map_or(0.0, |one| one.value)
    };
    let label = device.labels.get("device").map_or("", String::as_str);
    let name = numbers(label).map_or_else(String::new, |(major, minor)| format!("{major}:{minor}"));
    let transfers = before.devices.get(label).zip(after.devices.get(label));
    let latency = transfers.map_or_else(String::new, |(before, after)| latency(before, after));
    let stuck = if of_device("bifolio_device_stuck") > 0.0 { ", REFUSES WRITES" } else { "" };
    format!(
        "device   {name} dirty {} of {}{latency}{stuck}",
        bytes(device.value),
        bytes(of_device("bifolio_device_dirty_bytes_max"))
    )
}

/// Returns the major and minor number of a device, as `makedev` packs them.
fn numbers(device: &str) -> Option<(u64, u64)> {
    let packed: u64 = device.parse().ok()?;
    let major = (packed >> 8 & 0xfff) | (packed >> 32 & !0xfff);
    Some((major, (packed & 0xff) | (packed >> 12 & !0xff)))
}

impl Transfers {
    /// Returns the kernel's counters, or `None` for a device without blocks.
    fn of(device: &str) -> Option<Self> {
        let (major, minor) = numbers(device)?;
        let text = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).ok()?;
        let fields: Vec<f64> = text.split_whitespace().map_while(|one| one.parse().ok()).collect();
        let [reads, _, _, read_ms, writes, _, _, write_ms, ..] = fields[..] else { return None };
        Some(Self { reads, read_ms, writes, write_ms })
    }
}

/// Returns the mean time of the reads and writes between two snapshots.
fn latency(before: &Transfers, after: &Transfers) -> String {
    let mean = |ms: f64, count: f64| match count {
        _ if count > 0.0 => format!("{:.2} ms", ms.max(0.0) / count),
        _ => "-".to_owned(),
    };
    format!(
        ", mean read {}, write {}",
        mean(after.read_ms - before.read_ms, after.reads - before.reads),
        mean(after.write_ms - before.write_ms, after.writes - before.writes)
    )
}

fn bytes(value: f64) -> String {
    // Three digits.
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = value;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{value:.0} B") } else { format!("{value:.1} {}", units[unit]) }
}

fn number(value: f64) -> String {
    match value {
        _ if value >= 1e6 => format!("{:.1} M", value / 1e6),
        _ if value >= 1e4 => format!("{:.1} K", value / 1e3),
        _ => format!("{value:.0}"),
    }
}

/// Returns the end of a path that is longer than `width`.
fn end_of(path: &str, width: usize) -> String {
    let letters: Vec<char> = path.chars().filter(|letter| !letter.is_control()).collect();
    if letters.len() <= width {
        return letters.into_iter().collect();
    }
    let start = letters.len() - width + 3;
    format!("...{}", letters[start..].iter().collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_with_labels_is_read_as_it_was_written() {
        let line = r#"bifolio_file_resident_bytes{file="/a \"b\\c\nd",kind="x y"} 4096"#;
        let sample = parse(line).unwrap();
        assert_eq!((&*sample.name, sample.value), ("bifolio_file_resident_bytes", 4096.0));
        assert_eq!(sample.labels["file"], "/a \"b\\c\nd");
        assert_eq!(sample.labels["kind"], "x y");
        assert_eq!(parse("# TYPE a counter"), None);
        assert_eq!(parse("a{b=\"unfinished 1"), None);
        assert_eq!(parse("a 12").unwrap().value, 12.0);
    }

    #[test]
    fn the_latency_of_a_device_is_that_of_the_interval() {
        let before = Transfers { reads: 100.0, read_ms: 9000.0, writes: 5.0, write_ms: 50.0 };
        let after = Transfers { reads: 104.0, read_ms: 9002.0, ..before };
        assert_eq!(latency(&before, &after), ", mean read 0.50 ms, write -");
    }

    #[test]
    fn a_screen_has_80_columns_and_the_rates() {
        let at = Instant::now();
        let file = "/long".repeat(40);
        let snapshot = |misses: u64, at| {
            let text = format!(
                "bifolio_info{{name=\"{}\",pid=\"7\"}} 1\nbifolio_reads_misses_total {misses}\n\
                 bifolio_reads_hits_optimistic_total {}\nbifolio_memory_bound_bytes 1048576\n\
                 bifolio_evictions_folios_total {misses}\nbifolio_memory_inactive_bytes 40960000\n\
                 bifolio_storage_read_bytes_total {}\n\
                 bifolio_file_resident_bytes{{file=\"{file}\"}} 8192\n\
                 bifolio_file_misses_total{{file=\"{file}\"}} {misses}\n",
                "n".repeat(100),
                misses * 9,
                misses * 4096
            );
            let samples = text.lines().filter_map(parse).collect();
            Snapshot { socket: PathBuf::new(), at, samples, devices: HashMap::new() }
        };
        let shown = screen(&snapshot(0, at), &snapshot(2000, at + Duration::from_secs(2)));
        assert!(shown.lines().all(|line| line.chars().count() <= WIDTH), "{shown}");
        assert!(shown.contains("hit ratio 90.00 %, misses 1000/s"), "{shown}");
        // 10,000 pages wait, and 1,000 leave in a second.
        assert!(shown.contains("stays 10.0 s"), "{shown}");
        let line = shown.lines().last().unwrap();
        assert!(line.contains("8.0 KiB") && line.contains(" 1000 "), "{shown}");
        assert!(shown.contains("bound 1.0 MiB") || shown.contains("bound 1024.0 KiB"), "{shown}");
    }
}
