//! Counts of the events that the scenes of each class are for.
//!
//! A scene that no longer evicts or swaps passes, too, and finds nothing: a change of the library
//! moves what a scene meets. So events are counted, from the statistics of its cache and by its
//! threads, and a class without any event of a kind that it is for, after [`ENOUGH_SCENES`], is a
//! failure ([`Met::check`]).

use crate::history::Violation;
use crate::scene::{CLASSES, Class};
use bifolio::Stats;
use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Scenes, and time of the CPUs, after which a class must have met everything: what it is for
/// happens in a third of its scenes, or in a tenth of those that get little of the CPUs.
const ENOUGH_SCENES: u64 = 40;
const ENOUGH_TIME: Duration = Duration::from_secs(15);

/// Events that a class is for, by the names of [`events`]. Late stores and failed write-outs of
/// maps are too rare: tests of the library have them each time, by a gate or storage that fails.
const PURPOSES: [(Class, &[&str]); 6] = [
    (Class::Steady, &["evictions", "promotions", "shared flushes", "unflushed cuts"]),
    (Class::Cuts, &["evictions", "waits for write-outs", "unflushed cuts"]),
    (Class::Faults, &["evictions", "failed write-outs", "unflushed cuts"]),
    (Class::Memory, &["swap-outs", "swap-ins", "meetings at holes"]),
    (Class::Maps, &["unmapped pages", "faults"]),
    (Class::Handles, &["refaults", "unflushed cuts"]),
];

/// Events of a scene, by name.
pub type Counts = Vec<(&'static str, u64)>;

/// Events that the threads of a scene count.
#[derive(Debug, Default)]
pub struct Seen {
    /// Power cuts while the device had pages that no flush covered.
    pub unflushed_cuts: AtomicU64,
    /// Meetings of a thread that punches a hole or allocates with one that reads there.
    pub meetings_at_holes: AtomicU64,
    /// Futures of asynchronous calls that were dropped before they were ready.
    pub dropped_futures: AtomicU64,
}

/// Events of all scenes so far, by class.
#[derive(Debug, Default)]
pub struct Met {
    classes: BTreeMap<usize, Events>,
}

/// Events of the scenes of a class.
#[derive(Debug, Default)]
struct Events {
    scenes: u64,
    time: Duration,
    /// Number of events, and of scenes that had any.
    counts: BTreeMap<&'static str, (u64, u64)>,
}

impl Met {
    /// Adds a scene, which took this time of the CPUs.
    pub fn add(&mut self, class: Class, time: Duration, events: &[(&'static str, u64)]) {
        let number = CLASSES.iter().position(|other| *other == class).unwrap_or_default();
        let known = self.classes.entry(number).or_default();
        known.scenes += 1;
        known.time += time;
        for (name, count) in events {
            let (events, scenes) = known.counts.entry(name).or_default();
            *events += count;
            *scenes += u64::from(*count > 0);
        }
    }

    /// Prints the events of each class.
    pub fn tell(&self) {
        for (number, Events { scenes, time, counts }) in &self.classes {
            let met = counts.iter().filter(|(_, (events, _))| *events > 0);
            let met: Vec<_> = met
                .map(|(name, (events, scenes))| format!("{events} {name} in {scenes}"))
                .collect();
            let (class, seconds) = (CLASSES[*number].word(), time.as_secs());
            println!("torture: {scenes} scenes of {class}, {seconds} s: {}", met.join(", "));
        }
    }

    /// Fails if a class that had enough time met nothing of a kind that it is for.
    pub fn check(&self) -> Result<(), Violation> {
        for (number, Events { scenes, time, counts }) in &self.classes {
            let class = CLASSES[*number];
            let purposes = PURPOSES.iter().find(|(other, _)| *other == class);
            let is_enough = *scenes >= ENOUGH_SCENES && *time >= ENOUGH_TIME;
            for name in purposes.into_iter().flat_map(|(_, names)| *names).filter(|_| is_enough) {
                if counts.get(name).is_none_or(|(events, _)| *events == 0) {
                    let told = format!("{scenes} scenes of {} met no {name}", class.word());
                    return Err(Violation(told));
                }
            }
        }
        Ok(())
    }
}

/// Returns the events of a scene by name.
pub fn events(stats: &Stats, seen: &Seen) -> Counts {
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    vec![
        ("evictions", stats.evictions.folios),
        ("promotions", stats.evictions.activated_folios),
        ("refaults", stats.evictions.refaults),
        ("relocations", stats.evictions.relocated_folios),
        ("swap-outs", stats.storage.swapped_out_pages),
        ("swap-ins", stats.storage.swapped_in_pages),
        ("faults", stats.maps.faults),
        ("unmapped pages", stats.maps.unmapped_pages),
        ("late stores", stats.maps.stored_late_pages),
        ("failed write-outs", stats.storage.write_errors),
        ("waits for write-outs", stats.writes.writeback_waits),
        ("shared flushes", stats.writes.syncs_shared),
        ("unflushed cuts", count(&seen.unflushed_cuts)),
        ("meetings at holes", count(&seen.meetings_at_holes)),
        ("dropped futures", count(&seen.dropped_futures)),
    ]
}

/// Returns the time of the CPUs that this process has used.
pub fn cpu_time() -> Duration {
    let text = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = text.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    // A hundred in a second, on every Linux there is.
    Duration::from_millis(ticks * 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A class that met everything that it is for but `except`, in this part of the time.
    fn met(class: Class, except: &str, scenes: u64, time: Duration) -> Met {
        let purposes = PURPOSES.iter().find(|(other, _)| *other == class).expect("it has some").1;
        let events = purposes.iter().map(|name| (*name, u64::from(*name != except)));
        let (events, mut met) = (events.collect::<Counts>(), Met::default());
        (0..scenes).for_each(|_| met.add(class, time / scenes as u32, &events));
        met
    }

    #[test]
    fn a_class_that_met_nothing_of_a_kind_fails_when_it_had_the_time() {
        let is_well = |except, scenes, time| met(Class::Memory, except, scenes, time).check();
        let time = 2 * ENOUGH_TIME;
        let Err(Violation(told)) = is_well("swap-ins", 41, time) else { panic!("it met none") };
        assert_eq!(told, "41 scenes of memory met no swap-ins");
        assert!(is_well("swap-ins", ENOUGH_SCENES - 1, time).is_ok(), "too early to tell");
        assert!(is_well("swap-ins", 41, ENOUGH_TIME / 2).is_ok(), "on a busy machine");
        assert!(is_well("", 41, time).is_ok());
        let mut met = met(Class::Memory, "swap-ins", 41, time);
        met.add(Class::Memory, Duration::ZERO, &[("swap-ins", 1)]);
        assert!(met.check().is_ok());
    }

    #[test]
    fn every_purpose_is_the_name_of_an_event() {
        let events = events(&Stats::default(), &Seen::default());
        for name in PURPOSES.iter().flat_map(|(_, names)| *names) {
            assert!(events.iter().any(|(event, _)| event == name), "{name}");
        }
    }

    #[test]
    fn the_time_of_the_cpus_passes() {
        let begun = cpu_time();
        while cpu_time() == begun {
            std::hint::spin_loop();
        }
    }
}
