//! Lanes: transfers of one device, which share its threads.

use crate::io::{DeviceIdentity, DirectBacking};
use std::sync::Arc;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Lane {
    Of(DeviceIdentity),
    /// A backing without a device, by its address.
    Alone(usize),
}

pub(crate) fn lane_of(backing: &Arc<dyn DirectBacking>) -> Lane {
    match backing.identity() {
        Some(identity) => Lane::Of(identity.device()),
        None => Lane::Alone(Arc::as_ptr(backing).addr()),
    }
}
