//! Counters of the kernel: CPU time and memory of this process, bytes of devices, interrupts,
//! reclaim.
//!
//! Sampled before and after a window. Interrupts and reclaim are those of the whole machine: other
//! programs are included, and the first generation of control groups does not count by group. A
//! kind of interrupt that this machine does not have is not counted.

use std::fs;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::error::{Error, Result};
use crate::host::kibibytes_field;

/// Names of the kinds of interrupts from one CPU to another, and the kernel's descriptions: its
/// short names differ between processor families.
const INTERRUPTS: [(&str, &str); 2] =
    [("tlb_shootdowns", "TLB shootdowns"), ("function_call_ipis", "Function call interrupts")];

/// Returns the CPU time of this process: all its threads, also those that have ended, and the
/// kernel on their behalf, without the kernel's own threads.
pub(crate) fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let part = |part: i64| u64::try_from(part).unwrap_or(0);
    Duration::from_secs(part(time.tv_sec)) + Duration::from_nanos(part(time.tv_nsec))
}

/// Returns the largest resident size that this process ever had (`VmHWM`), or has now (`VmRSS`).
pub(crate) fn resident_bytes(field: &str) -> Result<u64> {
    kibibytes_field(&text("/proc/self/status")?, field)
        .ok_or_else(|| Error::Refused(format!("the kernel reports no {field} of this process")))
}

/// Returns the bytes that this process has read from devices.
pub(crate) fn bytes_read() -> Result<u64> {
    field(&text("/proc/self/io")?, "read_bytes:")
}

/// Counters that only grow, always the same ones in the same order.
pub(crate) type Counters = Vec<(&'static str, u64)>;

/// Returns the interrupts so far, by kind.
pub(crate) fn interrupts() -> Result<Counters> {
    Ok(interrupts_in(&text("/proc/interrupts")?))
}

fn interrupts_in(text: &str) -> Counters {
    let sum = |line: &str, description| -> Option<u64> {
        let numbers = line.trim_end().strip_suffix(description)?.split_whitespace().skip(1);
        Some(numbers.map_while(|number| number.parse::<u64>().ok()).sum())
    };
    let count = |description| text.lines().find_map(|line| sum(line, description));
    let kinds = INTERRUPTS.iter();
    kinds.filter_map(|&(name, description)| Some((name, count(description)?))).collect()
}

/// Returns the work of the kernel's reclaim so far: pages scanned, reclaimed (twice: under the
/// kernel's name and the benchmark's), and written, which `written` counts.
pub(crate) fn reclaim(written: &str) -> Result<Counters> {
    let text = text("/proc/vmstat")?;
    let taken = field(&text, "pgsteal_anon")? + field(&text, "pgsteal_file")?;
    Ok(vec![
        ("pgscan", field(&text, "pgscan_anon")? + field(&text, "pgscan_file")?),
        ("pgsteal", taken),
        ("pages_evicted", taken),
        ("pages_written", field(&text, written)?),
    ])
}

fn text(path: &str) -> Result<String> {
    fs::read_to_string(path).map_err(Error::system(format!("read {path}")))
}

/// Returns the value of a `name value` line.
pub(super) fn field(text: &str, name: &str) -> Result<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
        .ok_or_else(|| Error::Refused(format!("the kernel does not count `{name}`")))
}
