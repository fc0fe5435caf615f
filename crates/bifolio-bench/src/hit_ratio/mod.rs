//! `hit-ratio`: misses of the cache beside models of eviction policies with as many pages.
//!
//! Generated traces (`generators`), or a recorded one (`trace`), are replayed through a cache over
//! a backing in memory (`replay`) with room for a part of the pages that the trace uses. How many
//! pages that cache really had on average is the capacity of the models (`models`). The values are
//! misses in percent of the references; the first use of a page counts as one. Nothing is timed,
//! so the sizes of a trace run at once, and the figures do not depend on the machine.
//!
//! One row has the geometric means over the traces at a cache of 10 %, with the best model of that
//! row. Belady's policy is not among the candidates, because it knows the future.

mod generators;
mod models;
mod queues;
mod replay;
mod trace;

use std::thread;

use serde::Serialize;

use self::generators::{GENERATORS, Generator};
use self::models::{BELADY, LRU, POLICIES, misses};
use self::replay::{BIFOLIO, Replayed, replay};
use self::trace::Trace;
use crate::benchmark::{Benchmark, Context, Needs};
use crate::config::{Config, ParameterSet, Target};
use crate::error::Result;
use crate::progress::Progress;
use bifolio_report::{Case, Counts, Figure, Ratio, Report, Row, Skipped};

const NAME: &str = "hit-ratio";
const UNIT: &str = "% misses";
const OF_LRU: Ratio = Ratio::new(BIFOLIO, LRU);
const OF_BEST: Ratio = Ratio::new(BIFOLIO, BEST);
/// The series of the mean: the model with the fewest misses in that row.
const BEST: &str = "best_model";
/// The value of `trace` of the row of means.
const MEAN: &str = "geometric_mean";
/// The size of the cache that is summarised, in percent of the pages of the trace.
const SUMMARY_PERCENT: u32 = 10;

/// A cache of others to replay the traces through.
#[derive(Clone, Copy, Debug)]
pub struct Rival {
    /// The name of its series.
    pub name: &'static str,
    /// Returns the misses of references to pages, with room for so many of them.
    pub misses: fn(capacity_pages: usize, references: &[u32]) -> u64,
}

/// The benchmark `hit-ratio`: misses of generated or recorded traces, beside models of eviction
/// policies and beside rivals.
#[derive(Clone, Copy, Debug)]
pub struct HitRatio {
    /// The caches beside the models; none in `bifolio bench`.
    pub rivals: &'static [Rival],
}

/// The parameters of one run, as the envelope shows them.
#[derive(Clone, Debug, Serialize)]
struct Parameters {
    pages: u32,
    references: usize,
    percents: Vec<u32>,
    /// The recorded trace that is replayed instead of the generated ones.
    trace: Option<String>,
}

impl Parameters {
    fn from_config(config: &Config) -> Self {
        let (pages, references, percents): (_, _, &[u32]) = match config.set {
            ParameterSet::Smoke => (6000, 40_000, &[SUMMARY_PERCENT]),
            ParameterSet::Quick if config.summary_only => (60_000, 600_000, &[SUMMARY_PERCENT]),
            ParameterSet::Quick => (60_000, 600_000, &[5, SUMMARY_PERCENT, 25, 50]),
            ParameterSet::Full => (200_000, 4_000_000, &[1, 2, 5, SUMMARY_PERCENT, 25, 50, 75]),
        };
        let trace = config.trace.as_ref().map(|path| path.display().to_string());
        Self { pages, references, percents: percents.to_vec(), trace }
    }
}

impl Benchmark for HitRatio {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> &'static str {
        "misses of generated or recorded traces, against models of eviction policies"
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        let parameters = Parameters::from_config(config);
        let of_models = (parameters.references * 24 + parameters.pages as usize * 64) as u64;
        let of_all_models = of_models * parameters.percents.len() as u64;
        let percent = parameters.percents.iter().copied().map(u64::from).sum::<u64>();
        let of_caches = u64::from(parameters.pages) * 4096 * percent / 100;
        Ok(Needs { disk_bytes: 0, memory_bytes: of_all_models + of_caches })
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let parameters = Parameters::from_config(context.config);
        let mut report = Report::new(NAME, &context.host, serde_json::to_value(&parameters)?);
        if context.config.target == Target::Kernel {
            let reason = "the kernel's page cache is not replayed".to_owned();
            report.skipped.push(Skipped { series: "*".into(), reason });
            return Ok(report);
        }
        report.ratios = vec![OF_LRU, OF_BEST];
        let traces = traces(context.config, &parameters)?;
        let mut findings = Vec::new();
        progress.start("replay", traces.len() as u64);
        for trace in &traces {
            findings.push(run_trace(trace, &parameters.percents, self.rivals)?);
            progress.advance(1);
        }
        for (trace, findings) in traces.iter().zip(&findings) {
            for (percent, found) in parameters.percents.iter().zip(findings) {
                report.rows.push(found.row(trace, *percent, self.rivals));
                report.verified_bytes += found.replayed.verified_bytes;
            }
        }
        report.figures = report.rows.iter().filter_map(figure).collect();
        report.rows.extend(means(&report.rows, self.rivals));
        report.notes.push("belady knows the future: no policy can have fewer misses".into());
        Ok(report)
    }
}

fn traces(config: &Config, parameters: &Parameters) -> Result<Vec<Trace>> {
    if let Some(path) = &config.trace {
        return Ok(vec![trace::read(path)?]);
    }
    let generated = |generator: &Generator| Trace {
        name: generator.name.into(),
        references: (generator.generate)(parameters.pages, parameters.references),
        pages: parameters.pages,
    };
    Ok(GENERATORS.iter().map(generated).collect())
}

/// The misses of one trace with one size of the cache.
struct Found {
    replayed: Replayed,
    /// Misses of each model, in the order of [`POLICIES`].
    of_models: Vec<u64>,
    of_rivals: Vec<u64>,
}

/// Replays a trace with each size, all at once.
fn run_trace(trace: &Trace, percents: &[u32], rivals: &[Rival]) -> Result<Vec<Found>> {
    thread::scope(|scope| {
        let replay = |percent| scope.spawn(move || run_size(trace, percent, rivals));
        let threads: Vec<_> = percents.iter().copied().map(replay).collect();
        threads.into_iter().map(|thread| thread.join().expect("a replay panicked")).collect()
    })
}

fn run_size(trace: &Trace, percent: u32, rivals: &[Rival]) -> Result<Found> {
    let Trace { references, pages, .. } = trace;
    let wanted_pages = (u64::from(*pages) * u64::from(percent) / 100).max(64);
    let replayed = replay(references, *pages, wanted_pages)?;
    let capacity = replayed.resident_pages as usize;
    let of_models =
        POLICIES.map(|name| misses(name, capacity, *pages as usize, references)).to_vec();
    let of_rivals = rivals.iter().map(|rival| (rival.misses)(capacity, references)).collect();
    Ok(Found { replayed, of_models, of_rivals })
}

impl Found {
    fn row(&self, trace: &Trace, percent: u32, rivals: &[Rival]) -> Row {
        let case = Case::new().with("trace", trace.name.clone()).with("cache_percent", percent);
        let mut row = Row::new(case, UNIT);
        let share = |misses: u64| misses as f64 * 100.0 / trace.references.len() as f64;
        let counts = Counts::from([("pages".to_owned(), self.replayed.resident_pages as f64)]);
        row.add(BIFOLIO, vec![share(self.replayed.misses)], counts);
        let of_models = POLICIES.into_iter().zip(&self.of_models);
        let of_rivals = rivals.iter().map(|rival| rival.name).zip(&self.of_rivals);
        for (name, misses) in of_models.chain(of_rivals) {
            row.add(name, vec![share(*misses)], Counts::new());
        }
        row
    }
}

/// Returns the row of geometric means at the size that is summarised, with the best model in it.
fn means(rows: &[Row], rivals: &[Rival]) -> Option<Row> {
    let summarised: Vec<&Row> = rows
        .iter()
        .filter(|row| row.case.number("cache_percent") == Some(f64::from(SUMMARY_PERCENT)))
        .collect();
    let mean = |name: &str| {
        let logarithms = summarised.iter().map(|row| row.series[name].ln());
        (logarithms.sum::<f64>() / summarised.len() as f64).exp()
    };
    if summarised.is_empty() {
        return None;
    }
    let case = Case::new().with("trace", MEAN).with("cache_percent", SUMMARY_PERCENT);
    let mut row = Row::new(case, UNIT);
    row.add(BIFOLIO, vec![mean(BIFOLIO)], Counts::new());
    for name in POLICIES.into_iter().chain(rivals.iter().map(|rival| rival.name)) {
        row.add(name, vec![mean(name)], Counts::new());
    }
    let candidates = POLICIES.iter().filter(|name| **name != BELADY);
    let best = candidates.map(|name| mean(name)).fold(f64::INFINITY, f64::min);
    row.add(BEST, vec![best], Counts::new());
    Some(row)
}

/// Returns the figure of a row of a generated trace.
fn figure(row: &Row) -> Option<Figure> {
    let trace = row.case.text("trace");
    let target = GENERATORS.iter().find(|generator| generator.name == trace)?.at_most;
    let is_summarised = row.case.number("cache_percent") == Some(f64::from(SUMMARY_PERCENT));
    let name = format!("misses, bifolio / lru, {trace}, {SUMMARY_PERCENT} %");
    let value = row.ratio(&OF_LRU).filter(|_| is_summarised)?;
    Some(Figure { name, value, target, at_most: true })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_has_the_best_model_that_does_not_know_the_future() {
        let row = |percent: u32, factor: f64| {
            let case = Case::new().with("trace", "zipf").with("cache_percent", percent);
            let mut row = Row::new(case, UNIT);
            row.add(BIFOLIO, vec![2.0 * factor], Counts::new());
            for name in POLICIES {
                let value = if name == BELADY { 1.0 } else { 3.0 };
                row.add(name, vec![value * factor], Counts::new());
            }
            row
        };
        let rows = [row(10, 1.0), row(10, 4.0), row(25, 100.0)];
        let mean = means(&rows, &[]).unwrap();
        assert!((mean.series[BIFOLIO] - 4.0).abs() < 1e-9);
        assert!((mean.series[BEST] - 6.0).abs() < 1e-9);
        assert!(means(&rows[2..], &[]).is_none());
        assert!(figure(&rows[0]).unwrap().met() && figure(&rows[2]).is_none());
    }

    /// The pages of a burst are used again soon after a fill and then rarely: they must not push
    /// out those that are used again and again.
    #[test]
    fn bursts_and_skew_miss_less_than_lru() {
        for (name, generate, at_most) in [
            ("bursts", generators::bursts as fn(u32, usize) -> Vec<u32>, 0.93),
            ("zipf", generators::zipf, 0.93),
        ] {
            let pages = 20_000;
            let trace = Trace { name: name.into(), references: generate(pages, 200_000), pages };
            let found = run_size(&trace, SUMMARY_PERCENT, &[]).unwrap();
            let row = found.row(&trace, SUMMARY_PERCENT, &[]);
            let ratio = row.ratio(&OF_LRU).unwrap();
            assert!(ratio < at_most, "{name}: {ratio}");
        }
    }
}
