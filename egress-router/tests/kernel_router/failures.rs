//! A failure of any step leaves the namespace as it was.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use egress_router::call::{Attachment, plan_of, resolved};
use egress_router::config::{PodName, RouterConfig};
use egress_router::namespace;
use egress_router::setup::{Setup, Step, steps};
use serde_json::json;

use crate::world::{World, config, usual};

#[test]
fn a_failure_before_any_step_leaves_nothing() {
    for config in [usual(), config(&["192.168.12.99/24"], json!({"allow": ["203.0.113.0/24"]}))] {
        let world = World::new();
        let before = world.snapshot("router");
        let fields = config.as_object().expect("an object");
        let router = RouterConfig::of(fields, PodName::default()).expect("valid");
        let (addressing, _) = resolved(&router, PodName::default()).expect("it is given");
        let attempt = |fails_at: Option<usize>| {
            world.netns("node").run(|| {
                let node = namespace::own()?;
                let pod = File::open(world.path("router"))?;
                let attachment = Attachment { config: &router, addressing: &addressing, name: "net1" };
                let plan = plan_of(&attachment, (&node, &pod))?;
                let mut performed: Vec<Step> = Vec::new();
                let setup = Setup::new(&plan, node.as_fd(), pod.as_fd());
                let outcome = namespace::within(&pod, &node, || {
                    setup.perform(|step| match fails_at == Some(performed.len()) {
                        true => Err(io::Error::other("injected")),
                        false => {
                            performed.push(step.clone());
                            Ok(())
                        }
                    })
                })?;
                Ok((steps(&plan).len(), performed, outcome))
            })
        };
        let count = attempt(Some(0)).expect("the attempt ends").0;
        assert!(count > 15, "{count} steps");
        for at in 0..count {
            let (_, performed, outcome) = attempt(Some(at)).expect("the attempt ends");
            let error = outcome.expect_err("it is made to fail");
            assert!(error.message.contains("injected") && error.details.is_empty(), "{error}");
            println!("failed after {:?}", performed.last());
            world.assert_as_before("router", &before);
        }
        assert!(attempt(None).expect("the attempt ends").2.is_ok());
    }
}
