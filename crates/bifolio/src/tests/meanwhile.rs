//! What others do between two steps of the code, made certain: a test says what is to be done when
//! its own thread comes to a place, and the code tells, in test builds, when it is there.

use std::cell::RefCell;

type Action = Box<dyn FnOnce()>;

thread_local! {
    static NEXT: RefCell<Option<(&'static str, Action)>> = const { RefCell::new(None) };
}

/// Has `action` done, once, when this thread comes to `place`.
pub(crate) fn at(place: &'static str, action: impl FnOnce() + 'static) {
    NEXT.set(Some((place, Box::new(action))));
}

/// This thread is at `place`.
pub(crate) fn here(place: &'static str) {
    let action = NEXT.with_borrow_mut(|next| next.take_if(|(awaited, _)| *awaited == place));
    if let Some((_, action)) = action {
        action();
    }
}

/// Whether this thread came to the place that was asked for last.
pub(crate) fn was_there() -> bool {
    NEXT.take().is_none()
}
