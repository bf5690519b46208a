-- How an EmulatorPool is, for Argo CD. Written for what Argo CD gives a health check: Lua 5.1 and its base library.
--
-- Progressing  the operator has not seen this spec yet; slots of an old template are exchanged; phones are missing
-- Healthy      the pool is ready: phones that are exchanged, replaced or added one by one don't change that
-- Degraded     a person is needed, or the pool isn't ready and something is wrong with its phones
--
-- A pool that waits for a node or for an image is Progressing: both come by themselves.

local waits = {Unschedulable = true, ImagePullSlow = true}

local conditions = {}
if obj.status ~= nil and obj.status.conditions ~= nil then
  for _, condition in ipairs(obj.status.conditions) do
    conditions[condition.type] = condition
  end
end

local function holds(kind)
  return conditions[kind] ~= nil and conditions[kind].status == "True"
end

local function health(status, kind)
  return {status = status, message = conditions[kind].message}
end

if conditions.Ready == nil or obj.status.observedGeneration ~= obj.metadata.generation then
  return {status = "Progressing", message = "the operator has not seen this spec yet"}
end
if holds("Stalled") then
  return health("Degraded", "Stalled")
end
if holds("Reconciling") and conditions.Reconciling.reason == "RollingOut" then
  return health("Progressing", "Reconciling")
end
if holds("Ready") then
  local found = health("Healthy", "Ready")
  if holds("Degraded") then
    found.message = found.message .. "; " .. conditions.Degraded.message
  end
  return found
end
if holds("Degraded") then
  return health(waits[conditions.Degraded.reason] and "Progressing" or "Degraded", "Degraded")
end
return health("Progressing", holds("Reconciling") and "Reconciling" or "Ready")
