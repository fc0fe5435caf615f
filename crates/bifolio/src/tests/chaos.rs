//! The real primitives, with a seeded scheduler that may interfere at each use.
//!
//! For builds with `--cfg bifolio_chaos` (`cargo x chaos`, `cargo x torture --chaos`): the
//! protocols are unchanged, but a thread may be descheduled between two steps. At each use of a
//! primitive, a point, it continues, yields, spins, sleeps for up to some hundred microseconds, or
//! moves to another CPU. Points that change state, or publish a change, are eight times as likely
//! to be chosen as plain loads. `BIFOLIO_CHAOS=seed:rate` sets the seed and the number of points
//! per million of the likelier kind that are chosen; 0 chooses none. A few of the chosen ones stall
//! for up to 10 ms: long enough for other threads to evict a page and reuse its frame.
//!
//! Each thread has its own generator, seeded from the seed and the order in which threads reach
//! their first point. A seed does not replay a run exactly, because timing is real.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

pub(crate) use std::sync::atomic::Ordering;
use std::sync::atomic::{self, AtomicU64 as StdU64};

/// Chosen points per million, unless the variable sets another rate.
const RATE_DEFAULT: u64 = 2_000;
/// Factor by which a load is less likely to be chosen.
const LOAD_SHARE: u64 = 8;

/// One in this many chosen points is a stall, during which a tiny cache can evict a page and reuse
/// its frame, so that what the thread saw before is outdated.
const STALL_SHARE: u64 = 64;

#[derive(Debug)]
struct Settings {
    seed: u64,
    rate: u64,
}

static SETTINGS: LazyLock<Settings> = LazyLock::new(|| {
    let text = std::env::var("BIFOLIO_CHAOS").unwrap_or_default();
    let (seed, rate) = text.split_once(':').unwrap_or((text.as_str(), ""));
    let seed = seed.parse().unwrap_or(1);
    Settings { seed, rate: rate.parse().unwrap_or(RATE_DEFAULT) }
});
static THREADS: StdU64 = StdU64::new(0);

thread_local! {
    /// State of the thread's generator; 0 before its first point.
    static STATE: Cell<u64> = const { Cell::new(0) };
}

/// Returns the next random number of the thread (SplitMix64, after Steele, Lea and Flood, 2014).
fn draw() -> u64 {
    let before = STATE.get();
    let state = if before == 0 {
        // Relaxed: only needs to be a number that no other thread gets.
        let thread = THREADS.fetch_add(1, Ordering::Relaxed) + 1;
        SETTINGS.seed.wrapping_mul(0xD6E8_FEB8_6659_FD93) ^ thread.wrapping_mul(0xA076_1D64_78BD)
    } else {
        before
    };
    let state = state.wrapping_add(0x9E37_79B9_7F4A_7C15).max(1);
    STATE.set(state);
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

/// A point that changes state.
#[inline]
fn change() {
    meet(SETTINGS.rate);
}

/// A point that only reads.
#[inline]
fn look() {
    meet(SETTINGS.rate / LOAD_SHARE);
}

#[inline]
fn meet(rate: u64) {
    let drawn = draw();
    if drawn % 1_000_000 < rate {
        interfere(drawn >> 32);
    }
}

#[cold]
fn interfere(drawn: u64) {
    let microseconds = draw() % 100;
    if (drawn >> 4).is_multiple_of(STALL_SHARE) {
        return std::thread::sleep(Duration::from_micros(microseconds * 100));
    }
    match drawn % 16 {
        0..6 => std::thread::yield_now(),
        6..11 => {
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_micros(microseconds / 2) {
                std::hint::spin_loop();
            }
        }
        11..15 => std::thread::sleep(Duration::from_micros(microseconds * 3)),
        _ => change_cpu(draw()),
    }
}

/// Pins the thread to one CPU for now; does nothing where that is not allowed.
fn change_cpu(drawn: u64) {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let mut set = rustix::thread::CpuSet::new();
    set.set(drawn as usize % cpus);
    let _ = rustix::thread::sched_setaffinity(None, &set);
    std::thread::yield_now();
    // The thread has run on that CPU; now allow all of them again.
    (0..cpus).for_each(|cpu| set.set(cpu));
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// Defines an atomic type with the methods that the library uses.
macro_rules! atomic {
    ($name:ident, $value:ty, [$($operation:ident),*]) => {
        #[doc = concat!("An `atomic::", stringify!($name), "` with a point at each use.")]
        #[derive(Debug, Default)]
        #[repr(transparent)]
        pub(crate) struct $name(atomic::$name);

        #[allow(dead_code)]
        impl $name {
            pub(crate) const fn new(value: $value) -> Self {
                Self(atomic::$name::new(value))
            }

            pub(crate) fn get_mut(&mut self) -> &mut $value {
                self.0.get_mut()
            }

            #[inline]
            pub(crate) fn load(&self, ordering: Ordering) -> $value {
                let value = self.0.load(ordering);
                // After the load: a decision depends on its value.
                look();
                value
            }

            #[inline]
            pub(crate) fn store(&self, value: $value, ordering: Ordering) {
                change();
                self.0.store(value, ordering);
                change();
            }

            #[inline]
            pub(crate) fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                change();
                let answer = self.0.compare_exchange(current, new, success, failure);
                change();
                answer
            }

            #[inline]
            pub(crate) fn compare_exchange_weak(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                change();
                let answer = self.0.compare_exchange_weak(current, new, success, failure);
                change();
                answer
            }

            #[inline]
            pub(crate) fn fetch_update(
                &self,
                success: Ordering,
                failure: Ordering,
                update: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                change();
                let answer = self.0.fetch_update(success, failure, update);
                change();
                answer
            }

            $(
                #[inline]
                pub(crate) fn $operation(&self, value: $value, ordering: Ordering) -> $value {
                    change();
                    let before = self.0.$operation(value, ordering);
                    change();
                    before
                }
            )*
        }
    };
}

atomic!(AtomicBool, bool, [swap, fetch_or, fetch_and]);
atomic!(AtomicU8, u8, [swap, fetch_add, fetch_sub, fetch_or, fetch_and, fetch_max, fetch_xor]);
atomic!(AtomicU16, u16, [swap, fetch_add, fetch_sub, fetch_or, fetch_and, fetch_max, fetch_xor]);
atomic!(AtomicU32, u32, [swap, fetch_add, fetch_sub, fetch_or, fetch_and, fetch_max, fetch_xor]);
atomic!(
    AtomicU64,
    u64,
    [swap, fetch_add, fetch_sub, fetch_or, fetch_and, fetch_max, fetch_min, fetch_xor]
);

/// A fence with a point on either side.
#[inline]
pub(crate) fn fence(ordering: Ordering) {
    change();
    atomic::fence(ordering);
    change();
}

/// See `sync::real`.
#[inline]
pub(crate) fn store_owned(word: &AtomicU64, value: u64, ordering: Ordering) {
    word.store(value, ordering);
}

/// See `sync::real`.
pub(crate) fn word_of(word: &AtomicU32) -> &atomic::AtomicU32 {
    change();
    &word.0
}

/// See `sync::real`.
pub(crate) fn sleep_briefly() {
    std::thread::sleep(Duration::from_micros(50));
}

pub(crate) use std::hint::spin_loop;
pub(crate) use std::thread::yield_now;

/// A guard with a point after it releases its lock.
#[derive(Debug)]
pub(crate) struct Guard<G>(Option<G>);

/// The guard of [`Mutex::lock`].
pub(crate) type MutexGuard<'a, T> = Guard<parking_lot::MutexGuard<'a, T>>;
/// The guard of [`RwLock::read`].
pub(crate) type RwLockReadGuard<'a, T> = Guard<parking_lot::RwLockReadGuard<'a, T>>;
/// The guard of [`RwLock::write`].
pub(crate) type RwLockWriteGuard<'a, T> = Guard<parking_lot::RwLockWriteGuard<'a, T>>;

impl<G> Guard<G> {
    fn new(guard: G) -> Self {
        change();
        Self(Some(guard))
    }
}

impl<'a, T> MutexGuard<'a, T> {
    /// Runs `work` with the lock released.
    pub(crate) fn unlocked<U>(guard: &mut Self, work: impl FnOnce() -> U) -> U {
        let inner = guard.0.as_mut().expect("it is empty only during its drop");
        parking_lot::MutexGuard::unlocked(inner, work)
    }
}

impl<G: Deref> Deref for Guard<G> {
    type Target = G::Target;

    fn deref(&self) -> &G::Target {
        self.0.as_deref().expect("it is empty only during its drop")
    }
}

impl<G: DerefMut> DerefMut for Guard<G> {
    fn deref_mut(&mut self) -> &mut G::Target {
        self.0.as_deref_mut().expect("it is empty only during its drop")
    }
}

impl<G> Drop for Guard<G> {
    fn drop(&mut self) {
        change();
        drop(self.0.take());
        change();
    }
}

/// The lock of `parking_lot`, with points.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(parking_lot::Mutex<T>);

#[allow(dead_code)]
impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        change();
        Guard::new(self.0.lock())
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        change();
        self.0.try_lock().map(Guard::new)
    }

    pub(crate) fn try_lock_until(&self, deadline: Instant) -> Option<MutexGuard<'_, T>> {
        change();
        self.0.try_lock_until(deadline).map(Guard::new)
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }

    pub(crate) fn into_inner(self) -> T {
        self.0.into_inner()
    }
}

/// The lock of `parking_lot`, with points.
#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(parking_lot::RwLock<T>);

#[allow(dead_code)]
impl<T> RwLock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(parking_lot::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        change();
        Guard::new(self.0.read())
    }

    pub(crate) fn read_recursive(&self) -> RwLockReadGuard<'_, T> {
        change();
        Guard::new(self.0.read_recursive())
    }

    pub(crate) fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        change();
        self.0.try_read().map(Guard::new)
    }

    pub(crate) fn try_read_recursive(&self) -> Option<RwLockReadGuard<'_, T>> {
        change();
        self.0.try_read_recursive().map(Guard::new)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        change();
        Guard::new(self.0.write())
    }

    pub(crate) fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        change();
        self.0.try_write().map(Guard::new)
    }
}

/// The condition variable of `parking_lot`, with points.
#[derive(Debug, Default)]
pub(crate) struct Condvar(parking_lot::Condvar);

#[allow(dead_code)]
impl Condvar {
    pub(crate) const fn new() -> Self {
        Self(parking_lot::Condvar::new())
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        change();
        self.0.wait(guard.0.as_mut().expect("it is empty only during its drop"));
    }

    pub(crate) fn wait_until<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        deadline: Instant,
    ) -> parking_lot::WaitTimeoutResult {
        change();
        let inner = guard.0.as_mut().expect("it is empty only during its drop");
        self.0.wait_until(inner, deadline)
    }

    pub(crate) fn wait_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        duration: Duration,
    ) -> parking_lot::WaitTimeoutResult {
        change();
        let inner = guard.0.as_mut().expect("it is empty only during its drop");
        self.0.wait_for(inner, duration)
    }

    pub(crate) fn notify_one(&self) {
        change();
        self.0.notify_one();
        change();
    }

    pub(crate) fn notify_all(&self) {
        change();
        self.0.notify_all();
        change();
    }
}
