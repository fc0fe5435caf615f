//! The statistics as text in the format of Prometheus.

use std::fmt::{self, Write as _};
use std::fs;

use bifolio::{Cache, DeviceStats, FileStats, Stats};

/// Number of files that are listed: those with the most resident bytes.
const FILES_MAX: usize = 256;

/// Returns the statistics of `cache` as text in the format of Prometheus: each counter of [`Stats`]
/// as `bifolio_NAME_total`, each level as `bifolio_NAME`, and, with labels, those of devices and of
/// the 256 files with the most bytes in memory. `name` is a label of `bifolio_info`.
///
/// ```
/// # fn main() -> bifolio::Result<()> {
/// let cache = bifolio::Cache::builder().memory(16 << 20).build()?;
/// assert!(bifolio_stats::text(&cache, "demo").contains("bifolio_reads_misses_total 0\n"));
/// # Ok(())
/// # }
/// ```
pub fn text(cache: &Cache, name: &str) -> String {
    let stats = cache.stats();
    let mut text = Text::default();
    let process = std::process::id().to_string();
    text.labelled(
        "bifolio_info",
        "gauge",
        "The cache.",
        [([("name", name), ("pid", &*process)].to_vec(), 1)],
    );
    if let Some(bytes) = resident_bytes() {
        let help = "Resident memory of the process, bytes.";
        text.labelled("process_resident_memory_bytes", "gauge", help, [(Vec::new(), bytes)]);
    }
    for (name, count) in stats.counts() {
        text.plain(&format!("bifolio_{name}_total"), "counter", count);
    }
    for (name, level) in stats.levels() {
        text.plain(&format!("bifolio_{name}"), "gauge", level);
    }
    describe_devices(&stats, &mut text);
    let mut files = cache.files();
    files.sort_by_key(|file| std::cmp::Reverse(file.resident_bytes));
    files.truncate(FILES_MAX);
    let of_files = |value: fn(&FileStats) -> u64| {
        files.iter().map(move |file| (vec![("file", &*file.file)], value(file)))
    };
    let resident = of_files(|file| file.resident_bytes);
    text.labelled("bifolio_file_resident_bytes", "gauge", "Bytes in memory, by file.", resident);
    let dirty = of_files(|file| file.dirty_bytes);
    text.labelled("bifolio_file_dirty_bytes", "gauge", "Dirty bytes, by file.", dirty);
    let kept = of_files(|file| file.is_kept.into());
    text.labelled("bifolio_file_kept", "gauge", "1 if the file is closed, and kept.", kept);
    let counts: [FileCount; 5] = [
        ("misses", "Misses", |file| file.misses),
        ("refaults", "Misses of evicted pages", |file| file.refaults),
        ("evicted_folios", "Folios evicted", |file| file.evicted_folios),
        ("readahead_folios", "Folios read ahead", |file| file.readahead_folios),
        ("readahead_unused", "Folios read ahead and evicted unused", |file| file.readahead_unused),
    ];
    for (name, what, value) in counts {
        let name = format!("bifolio_file_{name}_total");
        text.labelled(&name, "counter", &format!("{what}, by file."), of_files(value));
    }
    text.0
}

fn describe_devices(stats: &Stats, text: &mut Text) {
    let names: Vec<String> = stats
        .devices
        .iter()
        .map(|device| match device.device {
            Some(number) => number.to_string(),
            None => device.first_file.clone(),
        })
        .collect();
    let of_devices = |value: fn(&DeviceStats) -> u64| {
        let devices = stats.devices.iter().zip(&names);
        devices.map(move |(device, name)| {
            (vec![("device", &**name), ("file", &*device.first_file)], value(device))
        })
    };
    let gauge = "gauge";
    text.labelled(
        "bifolio_device_dirty_bytes",
        gauge,
        "Dirty bytes, by device and a file on it.",
        of_devices(|device| device.dirty_bytes),
    );
    text.labelled(
        "bifolio_device_dirty_bytes_max",
        gauge,
        "Upper bound on the dirty bytes.",
        of_devices(|device| device.dirty_bytes_max),
    );
    text.labelled(
        "bifolio_device_stuck",
        gauge,
        "1 if the device refused all last writes.",
        of_devices(|device| device.is_stuck.into()),
    );
}

/// Returns the resident memory of this process.
fn resident_bytes() -> Option<u64> {
    let found = fs::read_to_string("/proc/self/statm").ok()?;
    Some(found.split(' ').nth(1)?.parse::<u64>().ok()? * rustix::param::page_size() as u64)
}

/// A count of a file: name, description, value.
type FileCount = (&'static str, &'static str, fn(&FileStats) -> u64);

/// Text in the format of Prometheus.
#[derive(Default)]
struct Text(String);

impl Text {
    fn plain(&mut self, name: &str, kind: &str, value: u64) {
        let _ = writeln!(self.0, "# TYPE {name} {kind}\n{name} {value}");
    }

    fn labelled<'l>(
        &mut self,
        name: &str,
        kind: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Vec<(&'l str, &'l str)>, u64)>,
    ) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, value) in samples {
            let shown: Vec<String> = labels
                .iter()
                .map(|(label, value)| format!("{label}=\"{}\"", Escaped(value)))
                .collect();
            let labels =
                if shown.is_empty() { String::new() } else { format!("{{{}}}", shown.join(",")) };
            let _ = writeln!(self.0, "{name}{labels} {value}");
        }
    }
}

/// The value of a label.
struct Escaped<'t>(&'t str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '\\' => formatter.write_str("\\\\")?,
                '"' => formatter.write_str("\\\"")?,
                '\n' => formatter.write_str("\\n")?,
                other => formatter.write_char(other)?,
            }
        }
        Ok(())
    }
}
