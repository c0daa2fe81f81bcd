//! Faults put on the lab, and taken off again.

use anyhow::{Context, Result};

use super::fault::Fault;
use super::ground::Ground;
use egress_lab::agents;
use egress_lab::cut::Cut;
use egress_lab::machine::StoppedMachine;
use egress_lab::topology::addresses::NodeNumber;

/// What is hit: the gateway of the address that the round is about, and the node of the controller that leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) gateway: NodeNumber,
    pub(super) leader: NodeNumber,
    pub(super) subject: usize,
}

impl Target {
    /// The node that the fault is on, if it is on one.
    pub(super) fn node(&self, fault: Fault) -> Option<NodeNumber> {
        match fault {
            Fault::ApiServer | Fault::Edit | Fault::Recreate | Fault::Restart => None,
            Fault::Leader => Some(self.leader),
            Fault::Cut
            | Fault::PowerOff
            | Fault::Uplink
            | Fault::Management
            | Fault::Kill
            | Fault::Stop
            | Fault::Label
            | Fault::Pause
            | Fault::NoApi
            | Fault::Isolate
            | Fault::CrashLoop
            | Fault::DeleteNode => Some(self.gateway),
        }
    }
}

/// Begins a fault.
pub(super) fn begin(ground: &mut Ground, fault: Fault, target: Target) -> Result<()> {
    let node = ground.lab.node(target.gateway).clone();
    match fault {
        Fault::Cut => {
            ground.lab.set_lan(&node, false)?;
            ground.lab.set_overlay(&node, false)
        }
        Fault::PowerOff => {
            agents::power(&ground.lab, &mut ground.agents[target.gateway.index()], false)?;
            ground.lab.set_pods(&node, false)?;
            // A node that boots has no programs of its former life.
            ground.agent(target.gateway).clean_up().map(drop)
        }
        Fault::Uplink => ground.lab.set_carrier(&node, false),
        Fault::Management => ground.lab.set_overlay(&node, false),
        Fault::Kill => ground.agent(target.gateway).kill(),
        Fault::Leader => ground.agent(target.leader).controller()?.kill(),
        Fault::Stop => ground.agent(target.gateway).pause(),
        Fault::ApiServer => outage(ground, true),
        Fault::Label => ground.assignable(target.gateway, false),
        Fault::Edit => ground.turn(target.subject),
        Fault::Recreate => ground.delete(target.subject),
        // One after the other would leave time for each to come back before the next goes.
        Fault::Restart => {
            agents::Agent::controllers(&mut ground.agents).try_for_each(agents::Controller::kill)?;
            ground.agents.iter_mut().try_for_each(agents::Agent::kill)
        }
        Fault::Pause => {
            ground.stopped = Some(StoppedMachine::stop(&ground.lab, &mut ground.agents[target.gateway.index()])?);
            Ok(())
        }
        Fault::NoApi => ground.lab.cut(&Cut::ApiServer(target.gateway)),
        Fault::Isolate => ground.lab.cut(&Cut::Nodes(target.gateway)),
        Fault::CrashLoop => ground.agent(target.gateway).restart(),
        Fault::DeleteNode => ground.delete_node(target.gateway),
    }
}

/// Ends it.
pub(super) fn end(ground: &mut Ground, fault: Fault, target: Target) -> Result<()> {
    let node = ground.lab.node(target.gateway).clone();
    match fault {
        Fault::Cut => {
            ground.lab.set_lan(&node, true)?;
            ground.lab.set_overlay(&node, true)
        }
        Fault::PowerOff => {
            agents::power(&ground.lab, &mut ground.agents[target.gateway.index()], true)?;
            // Its pods come behind its agent, as they do where the node is not ready before.
            ground.wait_for_agents()?;
            ground.lab.set_pods(&node, true)
        }
        Fault::Uplink => ground.lab.set_carrier(&node, true),
        Fault::Management => ground.lab.set_overlay(&node, true),
        Fault::Kill => ground.agent(target.gateway).restart(),
        Fault::Leader => ground.agent(target.leader).controller()?.restart(),
        Fault::Stop => ground.agent(target.gateway).resume(),
        Fault::ApiServer => outage(ground, false),
        Fault::Label => ground.assignable(target.gateway, true),
        Fault::Edit => Ok(()),
        Fault::Recreate => ground.create(target.subject),
        Fault::Restart => {
            agents::Agent::controllers(&mut ground.agents).try_for_each(agents::Controller::restart)?;
            ground.agents.iter_mut().try_for_each(agents::Agent::restart)
        }
        Fault::Pause => {
            let machine = ground.stopped.take().context("no machine is stopped")?;
            machine.resume(&ground.lab, &mut ground.agents[target.gateway.index()]).map(drop)
        }
        Fault::NoApi => ground.lab.mend(&Cut::ApiServer(target.gateway)),
        Fault::Isolate => ground.lab.mend(&Cut::Nodes(target.gateway)),
        Fault::CrashLoop => ground.agent(target.gateway).restart(),
        Fault::DeleteNode => ground.create_node(target.gateway),
    }
}

fn outage(ground: &Ground, is_out: bool) -> Result<()> {
    let server = ground.cluster.in_memory().context("only the lab's own API server can be stopped")?;
    server.set_outage(is_out);
    Ok(())
}
