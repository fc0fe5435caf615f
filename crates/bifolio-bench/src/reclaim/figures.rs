//! The figures that are asked of `reclaim`, worked out from its rows. Pure functions.

use super::memory_kind::{KERNEL_MMAP, KERNEL_SWAP, PER_31, PER_128, PER_FOLIO, UNCACHED};
use bifolio_report::{Figure, Ratio, Report, Row, Rss};

const OF_SWAP: Ratio = Ratio::new(PER_31, KERNEL_SWAP);
const OF_MMAP: Ratio = Ratio::new(PER_31, KERNEL_MMAP);
const OF_PER_FOLIO: Ratio = Ratio::new(PER_31, PER_FOLIO);

/// The columns beside the series.
pub(super) const RATIOS: [Ratio; 3] = [OF_SWAP, OF_MMAP, OF_PER_FOLIO];

/// A ratio of rates asked of the rows of one order, or of all.
struct Asked {
    under: &'static str,
    pattern: Option<&'static str>,
    at_least: f64,
}

const ASKED: [Asked; 4] = [
    Asked { under: PER_FOLIO, pattern: None, at_least: 1.5 },
    Asked { under: KERNEL_SWAP, pattern: Some("sequential"), at_least: 1.5 },
    Asked { under: KERNEL_SWAP, pattern: Some("random"), at_least: 1.0 },
    Asked { under: KERNEL_MMAP, pattern: None, at_least: 1.0 },
];

/// Ratios of shootdowns per evicted page, and the maximum of each. Checked where several workers
/// run: a single thread interrupts no other CPU.
const SHOOTDOWNS_ASKED: [(Ratio, f64); 5] = [
    (OF_PER_FOLIO, 1.0 / 15.0),
    (OF_SWAP, 1.0),
    (OF_MMAP, 1.0),
    (Ratio::new(PER_128, KERNEL_SWAP), 1.0 / 3.0),
    (Ratio::new(PER_128, KERNEL_MMAP), 1.0 / 3.0),
];

/// Maximum difference to the slowest of a thousand accesses without a cache, nanoseconds.
const WAIT_NS_AT_MOST: f64 = 100_000.0;

/// Maximum accesses, of a thousand, that wait 100 us or longer for reclaim: a wait that does not
/// depend on the device.
const STALLS_AT_MOST: f64 = 1.0;

/// Every figure that this report has the rows for.
pub(super) fn figures(report: &Report) -> Vec<Figure> {
    let mut figures = Vec::new();
    for row in &report.rows {
        figures.extend(ASKED.iter().filter_map(|asked| asked.figure(row)));
        figures.extend(SHOOTDOWNS_ASKED.iter().filter_map(|asked| shootdowns(row, asked)));
        figures.extend(waiting(row));
        figures.extend(stalls(row));
    }
    figures.extend(report.rss.as_ref().map(Rss::figure));
    figures
}

impl Asked {
    fn figure(&self, row: &Row) -> Option<Figure> {
        if self.pattern.is_some_and(|pattern| row.case.text("pattern") != pattern) {
            return None;
        }
        let value = row.ratio(&Ratio::new(PER_31, self.under))?;
        let name = format!("{PER_31} / {}, {}", self.under, describe(row));
        Some(Figure { name, value, target: self.at_least, at_most: false })
    }
}

fn shootdowns(row: &Row, (ratio, at_most): &(Ratio, f64)) -> Option<Figure> {
    let per_page = |series| {
        let count = |name| row.count(series, name);
        let pages = count("pages_evicted").filter(|pages| *pages > 0.0)?;
        Some(count("tlb_shootdowns")? / pages)
    };
    let under = per_page(&ratio.under).filter(|under| *under > 0.0)?;
    let several = row.case.text("workers") != "1";
    several.then_some(Figure {
        name: format!(
            "shootdowns per evicted page, {} / {}, {}",
            ratio.over,
            ratio.under,
            describe(row)
        ),
        value: per_page(&ratio.over)? / under,
        target: *at_most,
        at_most: true,
    })
}

fn waiting(row: &Row) -> Option<Figure> {
    let slow_ns = |series| row.count(series, "p999_fault_ns");
    Some(Figure {
        name: format!("p99.9 of a touch beyond that without a cache, ns, {}", describe(row)),
        value: slow_ns(PER_31)? - slow_ns(UNCACHED)?,
        target: WAIT_NS_AT_MOST,
        at_most: true,
    })
}

fn stalls(row: &Row) -> Option<Figure> {
    let count = |name| row.count(PER_31, name);
    Some(Figure {
        name: format!("touches of a thousand that waited 100 us for reclaim, {}", describe(row)),
        value: count("reclaim_stalls")? / (count("operations")? / 1000.0),
        target: STALLS_AT_MOST,
        at_most: true,
    })
}

fn describe(row: &Row) -> String {
    format!("{}, workers {}", row.case.text("pattern"), row.case.text("workers"))
}

#[cfg(test)]
mod tests {
    use super::super::case;
    use super::*;

    fn row(workers: usize, pattern: &str) -> Row {
        let mut row = Row::new(case(workers, pattern), "bogo ops/s");
        let rates = [(KERNEL_SWAP, 50.0), (PER_FOLIO, 20.0), (PER_31, 80.0)];
        row.series.extend(rates.map(|(series, rate)| (series.into(), rate)));
        for (series, shootdowns, slow_ns) in
            [(PER_FOLIO, 900.0, 0.0), (PER_31, 30.0, 250e3), (UNCACHED, 0.0, 200e3)]
        {
            let counts = row.counts.entry(series.into()).or_default();
            counts.insert("tlb_shootdowns".into(), shootdowns);
            counts.insert("pages_evicted".into(), 1000.0);
            counts.insert("p999_fault_ns".into(), slow_ns);
            counts.insert("operations".into(), 4000.0);
        }
        row
    }

    fn asked(row: &Row) -> Vec<Figure> {
        ASKED.iter().filter_map(|asked| asked.figure(row)).collect()
    }

    #[test]
    fn each_order_has_figures_of_its_own() {
        let figures = asked(&row(1, "sequential"));
        let found: Vec<_> = figures.iter().map(|figure| (figure.value, figure.target)).collect();
        assert_eq!(found, [(4.0, 1.5), (1.6, 1.5)], "no row has kernel_mmap");
        assert_eq!(asked(&row(1, "random"))[1].target, 1.0);
    }

    #[test]
    fn shootdowns_are_compared_a_page_between_several_workers() {
        let figure = shootdowns(&row(2, "random"), &SHOOTDOWNS_ASKED[0]).unwrap();
        assert!((figure.value - 30.0 / 900.0).abs() < 1e-9 && figure.met());
        assert!(shootdowns(&row(1, "random"), &SHOOTDOWNS_ASKED[0]).is_none());
        assert!(shootdowns(&row(2, "random"), &SHOOTDOWNS_ASKED[1]).is_none(), "not counted");
    }

    #[test]
    fn waiting_is_what_exceeds_the_disk() {
        let figure = waiting(&row(1, "random")).unwrap();
        assert_eq!((figure.value, figure.met()), (50e3, true));
    }

    #[test]
    fn stalls_are_counted_a_thousand_touches() {
        let mut row = row(1, "random");
        assert!(stalls(&row).is_none());
        row.counts.entry(PER_31.into()).or_default().insert("reclaim_stalls".into(), 6.0);
        let figure = stalls(&row).unwrap();
        assert_eq!((figure.value, figure.met()), (1.5, false));
    }
}
