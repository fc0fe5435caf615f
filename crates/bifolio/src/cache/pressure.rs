//! Lowers the bound of a cache while tasks wait for memory, and raises it again later.
//!
//! Called by the builder, if the program allows it, and by [`Cache::set_memory`](super::Cache):
//! what that sets is the bound to return to. Calls `Reclaim::set_bound`. A thread of its own looks
//! at the kernel's count ([`PressureSource`]) every two seconds. A bound that cannot be lowered,
//! since pages are pinned or cannot be written, stays until the next look.
//!
//! Leaves out what the process itself could do: memory outside of the cache is the program's.

use crate::config;
use crate::error::{Error, Result};
use crate::reclaim::Reclaim;
use crate::sync::{Condvar, Mutex};
use crate::sys::pressure::PressureSource;
use crate::sys::probe::{Feature, Features};
use crate::sys::process::OwnedThread;
use std::io;
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time between two looks. The same as the window of systemd's services, and so is the next.
const PERIOD: Duration = Duration::from_secs(2);
/// Part of the time in which some task waits, from which on memory is short.
const SHORT_DIVISOR: u128 = 10;
/// Part of the bound that a look takes away.
const STEP_DOWN_DIVISOR: u64 = 8;
/// Part of the bound that is given back at once: less, because what fills it may be what others
/// wait for.
const STEP_UP_DIVISOR: u64 = 16;
/// Consecutive looks at which memory is not short before the bound grows, at first.
const CALM_LOOKS: u32 = 5;
/// Largest number of such looks: it doubles each time that memory is short after the bound has
/// grown.
const CALM_LOOKS_MAX: u32 = 32 * CALM_LOOKS;

/// The thread that follows the pressure, until this is dropped.
#[derive(Debug)]
pub(super) struct PressureWatch {
    shared: Arc<PressureLoop>,
    thread: OwnedThread,
}

#[derive(Debug)]
struct PressureLoop {
    reclaim: Arc<Reclaim>,
    features: Features,
    source: PressureSource,
    /// Held while the bound is set.
    course: Mutex<Course>,
    is_ended: Mutex<bool>,
    ended: Condvar,
}

/// The bound, and how it follows the pressure.
#[derive(Debug)]
struct Course {
    /// The bound that the program asked for, bytes.
    full_bytes: u64,
    floor_bytes: u64,
    bound_bytes: u64,
    calm_looks: u32,
    calm_looks_wanted: u32,
    /// Set if the last change was up.
    has_grown: bool,
}

impl PressureWatch {
    /// Starts the thread; `None` if the kernel does not count, or the feature is disabled.
    pub(super) fn start(
        reclaim: &Arc<Reclaim>,
        features: &Features,
        (full_bytes, floor_bytes): (u64, u64),
    ) -> Result<Option<Self>> {
        let is_counted = features.has(Feature::MemoryPressure);
        let Some(source) = is_counted.then(PressureSource::of_process).and_then(io::Result::ok)
        else {
            return Ok(None);
        };
        let shared = Arc::new(PressureLoop {
            reclaim: Arc::clone(reclaim),
            features: features.clone(),
            source,
            course: Mutex::new(Course::new(full_bytes, floor_bytes)),
            is_ended: Mutex::new(false),
            ended: Condvar::new(),
        });
        let run = Arc::clone(&shared);
        let thread = OwnedThread::start("bifolio-pressure", move || run.run());
        Ok(Some(Self { shared, thread: thread.map_err(Error::thread)? }))
    }

    /// Sets the bound that the program asks for, bytes. Fails as [`Reclaim::set_bound`] does.
    pub(super) fn set_bound(&self, bytes: u64) -> Result<()> {
        let mut course = self.shared.course.lock();
        self.shared.reclaim.set_bound(bytes)?;
        *course = Course::new(bytes, course.floor_bytes);
        Ok(())
    }
}

impl Drop for PressureWatch {
    fn drop(&mut self) {
        if !self.thread.is_of_parent() {
            *self.shared.is_ended.lock() = true;
            self.shared.ended.notify_all();
        }
    }
}

impl PressureLoop {
    /// Looks at the pressure once a period, and follows it, until the last `Cache` is dropped or
    /// the count cannot be read any more.
    fn run(&self) {
        let mut seen = self.source.waited_us();
        let mut since = Instant::now();
        loop {
            {
                let mut is_ended = self.is_ended.lock();
                while !*is_ended && since.elapsed() < PERIOD {
                    self.ended.wait_until(&mut is_ended, since + PERIOD);
                }
                if *is_ended {
                    return;
                }
            }
            let before = match seen {
                Ok(waited_us) => waited_us,
                Err(error) => {
                    let call = "the count of waits for memory";
                    return self.features.withdraw(Feature::MemoryPressure, call, &error);
                }
            };
            seen = self.source.waited_us();
            let waited_us = seen.as_ref().map_or(0, |now| now.saturating_sub(before));
            let is_long = u128::from(waited_us) * SHORT_DIVISOR >= since.elapsed().as_micros();
            since = Instant::now();
            self.follow(is_long && !self.source.is_of_others());
        }
    }

    /// Takes a step of the course.
    fn follow(&self, is_short: bool) {
        let mut course = self.course.lock();
        let bytes = course.next(is_short);
        if bytes == course.bound_bytes {
            return;
        }
        match self.reclaim.set_bound(bytes) {
            Ok(()) => {
                log::debug!(
                    "memory is {}: a bound of {bytes} bytes",
                    if is_short { "short" } else { "free" }
                );
                course.bound_bytes = bytes;
            }
            Err(error) => log::debug!("memory is short, and the bound stays: {error}"),
        }
    }
}

impl Course {
    fn new(full_bytes: u64, floor_bytes: u64) -> Self {
        Self {
            full_bytes,
            floor_bytes,
            bound_bytes: full_bytes,
            calm_looks: 0,
            calm_looks_wanted: CALM_LOOKS,
            has_grown: false,
        }
    }

    /// Returns the bound after a look.
    fn next(&mut self, is_short: bool) -> u64 {
        if is_short {
            self.calm_looks = 0;
            if mem::take(&mut self.has_grown) {
                self.calm_looks_wanted = (2 * self.calm_looks_wanted).min(CALM_LOOKS_MAX);
            }
            let less = self.bound_bytes.saturating_sub(self.full_bytes / STEP_DOWN_DIVISOR);
            return less.max(self.floor_bytes).min(self.bound_bytes);
        }
        self.calm_looks += 1;
        if self.calm_looks < self.calm_looks_wanted {
            return self.bound_bytes;
        }
        self.calm_looks = 0;
        self.has_grown = self.bound_bytes < self.full_bytes;
        if !self.has_grown {
            self.calm_looks_wanted = CALM_LOOKS;
        }
        (self.bound_bytes + self.full_bytes / STEP_UP_DIVISOR).min(self.full_bytes)
    }
}

/// Checks the bound that a cache may fall to, bytes.
pub(super) fn validate_floor(floor_bytes: u64, bound_bytes: u64) -> Result<()> {
    let least_bytes = config::bound_bytes_min(config::chunk_bytes(bound_bytes));
    if (least_bytes..=bound_bytes).contains(&floor_bytes) {
        return Ok(());
    }
    let problem =
        format!("{floor_bytes} bytes is not from {least_bytes} to the bound ({bound_bytes})");
    Err(Error::config("memory_under_pressure", problem))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Cache, Feature, OpenOptions};
    use std::fs;

    const MIB: u64 = 1 << 20;

    /// Takes a step of the course, whose bound can be set.
    fn step(course: &mut Course, is_short: bool) -> u64 {
        course.bound_bytes = course.next(is_short);
        course.bound_bytes / MIB
    }

    #[test]
    fn the_bound_falls_to_the_floor_and_returns() {
        let mut course = Course::new(64 * MIB, 20 * MIB);
        let falls: Vec<_> = (0..7).map(|_| step(&mut course, true)).collect();
        assert_eq!(falls, [56, 48, 40, 32, 24, 20, 20]);
        let rises: Vec<_> = (0..60).map(|_| step(&mut course, false)).collect();
        assert_eq!(rises[..6], [20, 20, 20, 20, 24, 24]);
        assert_eq!(rises[59], 64);
        assert_eq!(rises.iter().position(|bound| *bound == 64), Some(54));
    }

    #[test]
    fn a_bound_that_was_raised_too_early_waits_longer() {
        let mut course = Course::new(64 * MIB, 16 * MIB);
        let mut calm_until_rise = || {
            while step(&mut course, true) > 16 {}
            let mut looks = 1;
            while step(&mut course, false) == 16 {
                looks += 1;
            }
            looks
        };
        assert_eq!([(); 8].map(|()| calm_until_rise()), [5, 10, 20, 40, 80, 160, 160, 160]);
    }

    #[test]
    fn a_floor_is_within_the_bound_and_has_chunks() {
        assert!(validate_floor(16 * MIB, 64 * MIB).is_ok());
        for (floor_bytes, bound_bytes) in [(65 * MIB, 64 * MIB), (4 * MIB, 64 * MIB), (1, MIB)] {
            assert!(validate_floor(floor_bytes, bound_bytes).is_err(), "{floor_bytes}");
        }
    }

    #[test]
    fn pages_go_with_the_bound_and_dirty_ones_are_written() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::builder().memory(8 * MIB).build().unwrap();
        let options = OpenOptions::new().write(true).create(true);
        let file = cache.open(directory.path().join("data"), &options).unwrap();
        file.write_all_at(&vec![7; 7 << 20], 0).unwrap();
        let shared = PressureLoop {
            reclaim: Arc::clone(&cache.inner.registry.reclaim),
            features: cache.inner.features.clone(),
            source: PressureSource::at(directory.path().join("none")),
            course: Mutex::new(Course::new(8 * MIB, 2 * MIB)),
            is_ended: Mutex::new(false),
            ended: Condvar::new(),
        };
        for _ in 0..7 {
            shared.follow(true);
        }
        let memory = cache.stats().memory;
        assert_eq!(memory.bound_bytes, 2 * MIB);
        assert!(memory.used_bytes <= 2 * MIB, "{memory:?}");
        let mut bytes = vec![0; 7 << 20];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn a_count_that_cannot_be_read_any_more_is_a_fallback_with_a_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("memory.pressure");
        fs::write(&path, "some avg10=0.00 total=5\n").unwrap();
        let cache = Cache::builder().memory(8 * MIB).build().unwrap();
        let features = Features::probe(&[]);
        let shared = Arc::new(PressureLoop {
            reclaim: Arc::clone(&cache.inner.registry.reclaim),
            features: features.clone(),
            source: PressureSource::at(path.clone()),
            course: Mutex::new(Course::new(8 * MIB, 2 * MIB)),
            is_ended: Mutex::new(false),
            ended: Condvar::new(),
        });
        fs::remove_file(path).unwrap();
        // Returns by itself.
        shared.run();
        assert!(!features.has(Feature::MemoryPressure));
        assert!(features.why_not(Feature::MemoryPressure).unwrap().contains("since the start"));
    }

    #[test]
    fn a_masked_probe_leaves_the_bound_and_says_so() {
        let builder = Cache::builder().memory(8 * MIB).memory_under_pressure(2 * MIB);
        let masked = builder.clone().disable(Feature::MemoryPressure).build().unwrap();
        assert!(masked.inner.pressure.is_none());
        let said = |cache: &Cache| {
            cache
                .stats()
                .fallbacks
                .iter()
                .any(|text| text.starts_with("memory-pressure: the bound"))
        };
        assert!(said(&masked));
        masked.set_memory(4 * MIB).unwrap();
        let cache = builder.build().unwrap();
        assert_eq!(cache.inner.pressure.is_some(), !said(&cache));
        cache.set_memory(4 * MIB).unwrap();
        assert_eq!(cache.stats().memory.bound_bytes, 4 * MIB);
    }
}
