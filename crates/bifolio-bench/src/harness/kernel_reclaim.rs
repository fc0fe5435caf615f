//! The work of the kernel's own reclaim, as it counts it for the whole machine.
//!
//! Sampled before and after a window, by a process in a control group that is smaller than what it
//! uses. The first generation of control groups does not count reclaim by group, so pages reclaimed
//! by other programs meanwhile are included.

use super::device_bytes::{field, text};
use crate::error::Result;

/// Destination of dirty pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    ToSwap,
    ToFiles,
}

/// Returns all counts so far, always in the same order: pages scanned, reclaimed (twice: under the
/// kernel's name and the benchmark's), and written.
pub(crate) fn counts(written: Written) -> Result<Vec<(&'static str, u64)>> {
    counts_in(&text("/proc/vmstat")?, written)
}

fn counts_in(text: &str, written: Written) -> Result<Vec<(&'static str, u64)>> {
    let scanned = field(text, "pgscan_anon")? + field(text, "pgscan_file")?;
    let taken = field(text, "pgsteal_anon")? + field(text, "pgsteal_file")?;
    let written = match written {
        Written::ToSwap => field(text, "pswpout")?,
        Written::ToFiles => field(text, "nr_written")?,
    };
    Ok(vec![
        ("pgscan", scanned),
        ("pgsteal", taken),
        ("pages_evicted", taken),
        ("pages_written", written),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_both_kinds_are_counted_where_they_go() {
        let text = "nr_written 9\npswpout 4\npgscan_anon 100\npgscan_file 20\n\
                    pgsteal_anon 50\npgsteal_file 3\n";
        let counts = |written| counts_in(text, written).unwrap();
        let swapped =
            [("pgscan", 120), ("pgsteal", 53), ("pages_evicted", 53), ("pages_written", 4)];
        assert_eq!(counts(Written::ToSwap), swapped);
        assert_eq!(counts(Written::ToFiles)[3], ("pages_written", 9));
        assert!(counts_in("pswpout 4\n", Written::ToSwap).is_err());
    }
}
