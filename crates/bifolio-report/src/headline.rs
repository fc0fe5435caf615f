//! The rows that a reader sees first: each mechanism compared with its predecessor and the kernel,
//! and the cache compared with the kernel. The summary of `bench`, the page and the plot of README
//! show the same ones.

use crate::envelope::{Ratio, Report, Row};

/// A row of a report, and the series that are shown.
#[derive(Debug)]
pub struct Line {
    /// The work, in a few words.
    pub label: &'static str,
    /// The benchmark that measures it.
    pub bench: &'static str,
    /// Values of its case; of several rows the last one, which has the most threads.
    pub case: &'static [(&'static str, &'static str)],
    /// The series without the mechanism; empty if the line compares with the kernel only.
    pub before: &'static str,
    /// The series of Bifolio.
    pub ours: &'static str,
    /// The series of the stock kernel.
    pub kernel: &'static str,
}

/// One of the four mechanisms.
#[derive(Debug)]
pub struct Mechanism {
    /// Its name.
    pub title: &'static str,
    /// Its effect, in one sentence.
    pub meaning: &'static str,
    /// The rows that show it.
    pub lines: &'static [Line],
}

const fn line(
    label: &'static str,
    bench: &'static str,
    case: &'static [(&'static str, &'static str)],
    series: [&'static str; 3],
) -> Line {
    let [before, ours, kernel] = series;
    Line { label, bench, case, before, ours, kernel }
}

/// The four mechanisms: without, with, and the stock kernel.
pub const MECHANISMS: [Mechanism; 4] = [
    Mechanism {
        title: "Reference count: one add, no loop",
        meaning: "Threads that pin the same page do not fail for each other.",
        lines: &[
            line(
                "pins of one page",
                "small-reads",
                &[("pattern", "hot")],
                ["pin_cas", "pin_frozen_bit", "kernel_pread_tmpfs"],
            ),
            line(
                "reads of it, no pin",
                "small-reads",
                &[("pattern", "hot")],
                ["pin_cas", "optimistic", "kernel_pread_tmpfs"],
            ),
        ],
    },
    Mechanism {
        title: "Batched reads: many pages at once",
        meaning: "A long read looks its pages up together, and locks none of them.",
        lines: &[
            line(
                "64 KiB, in order",
                "seq-reads",
                &[("layout", "written"), ("folio_bytes", "4096"), ("block_bytes", "65536")],
                ["one_by_one", "batched", "kernel_tmpfs"],
            ),
            line(
                "64 KiB, scattered pages",
                "seq-reads",
                &[("layout", "scattered"), ("folio_bytes", "4096"), ("block_bytes", "65536")],
                ["one_by_one", "batched", "kernel_tmpfs"],
            ),
        ],
    },
    Mechanism {
        title: "One flush for a batch of evicted pages",
        meaning: "Reclaim interrupts the other CPUs once for 31 pages, not for each.",
        lines: &[
            line(
                "map, stores in order",
                "reclaim",
                &[("pattern", "sequential")],
                ["flush_per_folio", "flush_per_batch_31", "kernel_swap"],
            ),
            line(
                "map, stores, random",
                "reclaim",
                &[("pattern", "random")],
                ["flush_per_folio", "flush_per_batch_31", "kernel_swap"],
            ),
        ],
    },
    Mechanism {
        title: "Drains only where they can help",
        meaning: "Advice to evict asks the one CPU that may hold a page, not all of them.",
        lines: &[line(
            "advice, mapped stream",
            "advise",
            &[("workload", "mapped_stream")],
            ["drain_on_any_failure", "targeted", "kernel"],
        )],
    },
];

/// The cache compared with the kernel.
pub const BESIDE_THE_KERNEL: [Line; 11] = [
    line(
        "hits, 64 B, random",
        "small-reads",
        &[("pattern", "uniform"), ("block_bytes", "64"), ("fill", "in_order")],
        ["", "optimistic", "kernel_pread_file"],
    ),
    line(
        "misses, 4 KiB, random",
        "random-reads",
        &[("pattern", "uniform"), ("depth", "1")],
        ["", "read_at", "kernel_pread"],
    ),
    line(
        "misses, 4 KiB, skewed",
        "random-reads",
        &[("pattern", "zipf"), ("depth", "1")],
        ["", "read_at", "kernel_pread"],
    ),
    line(
        "gather, 4 KiB, WILLNEED",
        "gather",
        &[("row_bytes", "4096"), ("state", "cold")],
        ["", "read_many", "kernel_willneed"],
    ),
    line("scan of a large file", "scan", &[], ["", "read_at", "kernel_pread"]),
    line(
        "writes, 4 KiB, random",
        "writes",
        &[("pattern", "random")],
        ["", "write_at", "kernel_write"],
    ),
    line(
        "writes, 1 MiB, in order",
        "writes",
        &[("pattern", "sequential")],
        ["", "write_at", "kernel_write"],
    ),
    line("log records, synced", "writes", &[("pattern", "log")], ["", "write_at", "kernel_write"]),
    line(
        "pages synced (O_DIRECT)",
        "writes",
        &[("pattern", "records")],
        ["", "write_at", "kernel_direct"],
    ),
    line("map, loads, one page", "map-reads", &[("pattern", "hot")], ["", "map", "kernel_mapping"]),
    line(
        "map, loads, random",
        "map-reads",
        &[("pattern", "uniform")],
        ["", "map", "kernel_mapping"],
    ),
];

/// The misses of the cache compared with those of LRU and of the best model of a policy.
pub const MISSES: Line = line(
    "7 traces, cache 10 %",
    "hit-ratio",
    &[("trace", "geometric_mean")],
    ["lru", "bifolio", "best_model"],
);

impl Line {
    /// Returns the row of the line, if a report has it.
    pub fn row<'a>(&self, reports: &'a [Report]) -> Option<&'a Row> {
        let report = reports.iter().find(|report| report.bench == self.bench)?;
        self.rows(report).last()
    }

    /// Returns the rows of a report that differ from the line's in the number of threads only;
    /// none if the report is of another benchmark.
    pub fn rows<'a>(&self, report: &'a Report) -> impl Iterator<Item = &'a Row> {
        let is_meant = move |row: &&Row| {
            row.series.contains_key(self.ours)
                && self.case.iter().all(|(key, value)| row.case.text(key) == *value)
        };
        let rows = if report.bench == self.bench { &report.rows[..] } else { &[] };
        rows.iter().filter(is_meant)
    }

    /// Returns how many times better Bifolio is than the series `other`, as a ratio of series of
    /// `row`: less cost is better, and so is more work.
    pub fn times_better(&self, row: &Row, other: &'static str) -> Ratio {
        speed(row, &Ratio::new(self.ours, other))
    }
}

/// Returns the ratio that is above 1 if the series `ratio.over` is faster: values that are
/// costs are divided the other way round.
pub fn speed(row: &Row, ratio: &Ratio) -> Ratio {
    let Ratio { over, under } = ratio.clone();
    if is_cost(&row.unit) { Ratio { over: under, under: over } } else { Ratio { over, under } }
}

/// Returns `true` if values of this unit are better the smaller they are: times, misses and sizes.
pub fn is_cost(unit: &str) -> bool {
    unit.starts_with("ns") || unit.ends_with("misses") || ["CPU s", "MiB"].contains(&unit)
}
