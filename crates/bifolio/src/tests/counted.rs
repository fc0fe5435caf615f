//! A mutex that records its acquisitions: for tests of the library that check which locks a call
//! takes.
//!
//! Only compiled into those tests. Inside [`locked_by`] a thread records the type behind each mutex
//! that it takes. The type names the lock, because each protects a type of its own, except those
//! over `()`.

use super::plain::{self, MutexGuard};
use std::any::type_name;
use std::cell::RefCell;

thread_local! {
    static LOCKED: RefCell<Option<Vec<&'static str>>> = const { RefCell::new(None) };
}

/// Calls `call`. Returns the types behind the mutexes that this thread took during it, in order.
pub(crate) fn locked_by(call: impl FnOnce()) -> Vec<&'static str> {
    LOCKED.set(Some(Vec::new()));
    call();
    LOCKED.take().expect("calls of this are not nested")
}

/// A mutex that records the type of its value each time a thread takes it.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(plain::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(plain::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        note::<T>();
        self.0.lock()
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        note::<T>();
        self.0.try_lock()
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }
}

fn note<T>() {
    let noted = |locked: &RefCell<Option<Vec<&'static str>>>| {
        locked.borrow_mut().iter_mut().for_each(|locked| locked.push(type_name::<T>()));
    };
    // A thread that is ending records nothing.
    let _ = LOCKED.try_with(noted);
}
