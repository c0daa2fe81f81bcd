//! Waiting for a lock that somebody may hold over a walk of whole maps, so that the wait can be ended.
//!
//! Who waits in the lock itself keeps its thread and cannot be told anything: an agent whose leases run out meanwhile would
//! give its addresses up behind the walk. Behind this wait the lock is taken at once, but for somebody who comes in between.

use std::sync::{Mutex, TryLockError};
use std::time::Duration;

/// Between two looks. A walk takes tenths of a second where the maps are full, and most locks are free at the first.
const LOOK: Duration = Duration::from_millis(1);

pub(super) async fn free<T>(lock: &Mutex<T>) {
    while matches!(lock.try_lock(), Err(TryLockError::WouldBlock)) {
        tokio::time::sleep(LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn a_wait_for_a_walk_can_be_ended_and_ends_with_the_walk() {
        let lock = Arc::new(Mutex::new(()));
        free(&lock).await;
        let (walks, (tell, told)) = (lock.clone(), std::sync::mpsc::channel::<()>());
        let walk = std::thread::spawn(move || {
            let _held = walks.lock();
            let _ends = told.recv();
        });
        while lock.try_lock().is_ok() {
            tokio::time::sleep(LOOK).await;
        }
        let short = Duration::from_millis(20);
        assert!(tokio::time::timeout(short, free(&lock)).await.is_err());
        tell.send(()).expect("it walks");
        tokio::time::timeout(Duration::from_secs(5), free(&lock)).await.expect("the walk is over");
        walk.join().expect("no panic");
    }
}
